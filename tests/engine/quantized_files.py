"""What tests of quantized checkpoints read of them, state in them and compare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint import EMBEDDED
from engine.model.load.checkpoint import Checkpoint
from engine.model.load.loader import load_model

TINY = EMBEDDED["baton-tiny"]


def linear_weights(model: Any) -> dict[str, Tensor]:
    return {name: module.weight for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}


def restate(folder: Path, **changes: Any) -> None:
    """What config.json states of the format."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


def check_loads_alike(folder: Path, wanted: dict[str, Tensor]) -> None:
    found = load_model(Checkpoint.open(folder), load_format="safetensors").state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())
