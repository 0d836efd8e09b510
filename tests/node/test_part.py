"""The sizes of a rank's part, by its flags and its device, and the threads that compute it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model.load.checkpoint import Checkpoint
from node.build import build
from node.ranks.part import _limits, _require_fp8
from node.settings import NodeSettings
from tests.node.tiny_checkpoint import save_tiny


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.mark.parametrize(
    ("device", "fields", "is_padded", "runs_ahead"),
    [
        ("cpu", {}, False, False),
        ("cpu", {"async_scheduling": True}, False, True),
        ("cuda", {}, True, True),
        ("cuda", {"enforce_eager": True, "async_scheduling": False}, False, False),
    ],
)
def test_steps_are_padded_as_graphs_are_and_launched_ahead_on_gpus(
    checkpoint: Path, device: str, fields: dict[str, Any], is_padded: bool, runs_ahead: bool
) -> None:
    settings = NodeSettings(model=str(checkpoint), max_model_len=200, **fields)
    limits = _limits(settings, Checkpoint.find(str(checkpoint)), torch.device(device))
    assert (bool(limits.padding.ladders), limits.async_scheduling) == (is_padded, runs_ahead)
    assert limits.num_blocks == 13 + 1, "as few as one request may need"


def test_torch_has_the_threads_that_are_set(checkpoint: Path) -> None:
    before = torch.get_num_threads()
    try:
        build(NodeSettings(model=str(checkpoint), device="cpu", cpu_threads=before + 1, num_gpu_blocks_override=40))
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("capability", "is_refused"), [((8, 6), True), ((8, 9), False), ((9, 0), False)])
def test_kv_in_8_bits_needs_a_gpu_that_has_the_type(
    capability: tuple[int, int], is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    with pytest.raises(ValueError, match="a GPU has less") if is_refused else contextlib.nullcontext():
        _require_fp8(torch.device("cuda", 0), 16)
