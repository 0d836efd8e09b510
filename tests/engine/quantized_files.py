"""What tests of quantized checkpoints read of them, state in them and compare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.checkpoint import EMBEDDED
from engine.model.load.checkpoint import Checkpoint
from engine.model.load.loader import load_model
from tools.quantize import write

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


def write_own_sizes(folder: Path) -> dict[str, Tensor]:
    """A checkpoint in GPTQ's 4 bits and groups of 128, but projections down have 8 bits and sorted columns, and
    projections up have groups of 64. Returns its values."""
    kinds = ("qweight", "qzeros", "scales", "g_idx")
    write(TINY, folder / "8", "gptq-8bit")
    write(TINY, folder, "gptq")
    wanted = load_model(Checkpoint.open(folder)).state_dict()
    other = load_model(Checkpoint.open(folder / "8")).state_dict()
    file = folder / "model.safetensors"
    tensors, eight = load_file(file), load_file(folder / "8" / "model.safetensors")
    for layer in [name.removesuffix(".qweight") for name in tensors if name.endswith("qweight")]:
        if "down_proj" in layer:
            tensors |= {f"{layer}.{kind}": eight[f"{layer}.{kind}"] for kind in kinds}
            wanted[f"{layer}.weight"] = other[f"{layer}.weight"]
        elif "up_proj" in layer:
            halves = {f"{layer}.{kind}": tensors[f"{layer}.{kind}"].repeat_interleave(2, 0) for kind in kinds[1:3]}
            tensors |= {**halves, f"{layer}.g_idx": torch.arange(256, dtype=torch.int32) // 64}
    save_file(tensors, file, metadata={"format": "pt"})
    restate(folder, dynamic={"+:.*down_proj.*": {"bits": 8, "desc_act": True}, ".*up_proj.*": {"group_size": 64}})
    return wanted


def write_exponents(folder: Path) -> dict[str, Tensor]:
    """A checkpoint in 8 bits whose blocks have powers of 2 as scales, in one byte each, as with DeepSeek's `scale_fmt`
    ue8m0. Returns its values."""
    write(TINY, folder, "fp8-block")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    scales = {name: scale.log2().round().exp2() for name, scale in tensors.items() if name.endswith("_scale_inv")}
    save_file(tensors | scales, file, metadata={"format": "pt"})
    wanted = load_model(Checkpoint.open(folder)).state_dict()
    bytes_each = {name: scale.to(torch.float8_e8m0fnu) for name, scale in scales.items()}
    save_file(tensors | bytes_each, file, metadata={"format": "pt"})
    restate(folder, scale_fmt="ue8m0")
    return wanted
