"""What the headers of safetensors files, and their index, must say; without reading a model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.model.errors import UnsupportedModel
from engine.model.safetensors_index import read_stored, weight_files

Header = dict[str, Any]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    tensors = {"a": torch.zeros(4, 2), "b": torch.zeros(4, 2), "empty": torch.zeros(0, 2)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


def write(file: Path, change: Callable[[Header], Any], more: bytes = b"") -> None:
    raw = file.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.dumps(change(json.loads(raw[8:end]))).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + raw[end:] + more)


def test_what_a_header_says(file: Path) -> None:
    stored = read_stored([file])
    assert {name: (tensor.dtype, tensor.shape, tensor.num_bytes) for name, tensor in stored.items()} == {
        "a": ("F32", (4, 2), 32),
        "b": ("F32", (4, 2), 32),
        "empty": ("F32", (0, 2), 0),
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": None},
        {"dtype": "F16"},
        {"shape": "42"},
        {"shape": [4.0, 2.0]},
        {"shape": [-4, -2]},
        {"data_offsets": [32, 0]},
        {"data_offsets": [-8, 24]},
        {"data_offsets": [0.0, 32.0]},
        {"data_offsets": [0, 32]},  # as another one has, too
        {"data_offsets": [8, 40]},
        {"data_offsets": [0, 28]},
    ],
    ids=str,
)
def test_values_that_safetensors_would_refuse(file: Path, changes: Header) -> None:
    write(file, lambda header: header | {"b": header["b"] | changes})
    with pytest.raises(UnsupportedModel, match=r"model\.safetensors cannot be read: ."):
        read_stored([file])


@pytest.mark.parametrize("header", [[], 5, None, {"a": [1]}, {"a": None}, {}])
def test_what_is_no_header(file: Path, header: object) -> None:
    write(file, lambda _: header)
    with pytest.raises(UnsupportedModel, match=r"model\.safetensors cannot be read: ."):
        read_stored([file])


def test_a_header_too_deep_to_read(file: Path) -> None:
    deep = b"[" * 100_000
    file.write_bytes(len(deep).to_bytes(8, "little") + deep)
    with pytest.raises(UnsupportedModel, match="recursion"):
        read_stored([file])


def test_bytes_of_no_tensor(file: Path) -> None:
    write(file, lambda header: header, more=b"12345")
    with pytest.raises(UnsupportedModel, match="5 bytes at its end"):
        read_stored([file])


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UnsupportedModel, match="pipe cannot be read"):
        read_stored([tmp_path / "pipe"])


@pytest.mark.parametrize(
    "text", ["{", "{}", "[]", '{"weight_map": []}', '{"weight_map": {"a": 1, "b": "c"}}', "[" * 100_000], ids=range(6)
)
def test_an_index_that_names_no_files(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UnsupportedModel, match=r"model\.safetensors\.index\.json"):
        weight_files(tmp_path)
