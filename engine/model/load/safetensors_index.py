"""The tensors of safetensors files, read from their headers alone.

A file consists of 8 bytes with the header's length, the header (JSON: name -> dtype, shape, offsets), and the data
without gaps.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.model.errors import UnsupportedModel

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
}
"""The dtypes that can be read directly; files may have others (F8_E5M2, ...)."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor's bytes are. `dtype`: as the file spells it. `offset`: from the beginning of the file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def weight_files(path: Path) -> list[Path]:
    """The files that transformers would load from a checkpoint's folder: model.safetensors, or the shards of its index;
    none when there is neither."""
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [path / name for name in sorted(set(shards))]
    return []


def read_stored(files: list[Path]) -> dict[str, StoredTensor]:
    """All tensors of the files by name. Raises UnsupportedModel for a file that is truncated or not safetensors."""
    return {tensor.name: tensor for file in files for tensor in _read_header(file)}


def _read_header(file: Path) -> list[StoredTensor]:
    try:
        size = file.stat().st_size
        with file.open("rb") as data:
            length = int.from_bytes(data.read(8), "little")
            if 8 + length > size:
                raise ValueError("the header is longer than the file")
            header: dict[str, Any] = json.loads(data.read(length))
        header.pop("__metadata__", None)
        tensors = [_stored(name, file, 8 + length, entry) for name, entry in header.items()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnsupportedModel(f"{file} cannot be read: {error}") from error
    if cut := [tensor.name for tensor in tensors if tensor.offset + tensor.num_bytes > size]:
        raise UnsupportedModel(f"{file} is cut off: it lacks the data of {cut[0]}")
    return tensors


def _stored(name: str, file: Path, data_start: int, entry: dict[str, Any]) -> StoredTensor:
    begin, end = entry["data_offsets"]
    return StoredTensor(name, file, entry["dtype"], tuple(entry["shape"]), data_start + begin, end - begin)
