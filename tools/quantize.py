"""Write a checkpoint of 16 bits as a quantized one, in any of the published formats that nodes read.

    python -m tools.quantize baton-tiny OUT --format awq
    python -m tools.quantize baton-tiny OUT --format awq --dequantized   # what those weights stand for, in fp32
    python -m tools.quantize GPT_OSS OUT --format mxfp4   # a mixture whose experts are in one tensor, as gpt-oss's

Weights are rounded to the nearest value, without calibration: for tests, tables of accuracy, and to try a format. Use
LLM Compressor, GPTQModel or AutoAWQ for a model that will be served in 4 bits.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.checkpoint import EMBEDDED

FP8_MAX = 448.0
GROUP = 128
"""Columns that share a scale, of AWQ and GPTQ."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Tensors = dict[str, Tensor]
_LAYERS = re.compile(r"_proj\.weight$|\.experts\.\d+\.w[123]\.weight$")
"""Mixtral and MiniMax-M2 call the layers of an expert w1, w2 and w3."""


@dataclass(frozen=True, slots=True)
class Format:
    """quantize: the tensors that stand for a layer's weight, by the ends of their names, and the weight that they
    stand for, in fp32. config: config.json's `quantization_config`. experts: of mixtures' experts, [num_experts,
    columns, rows], instead of layers."""

    config: Mapping[str, Any]
    quantize: Callable[[Tensor], tuple[Tensors, Tensor]]
    experts: bool = False

    def stored_names(self, name: str) -> str | None:
        """What the names of the tensors begin with that stand for this one; None: it stays as it is."""
        if self.experts:
            return f"{name}_" if name.endswith(("experts.gate_up_proj", "experts.down_proj")) else None
        return name.removesuffix("weight") if _LAYERS.search(name) else None


def scales(weight: Tensor, largest: float, group: int) -> Tensor:
    """[rows, num_groups]: so that a group's largest value becomes `largest`."""
    return weight.view(weight.shape[0], -1, group).abs().amax(2).clamp(min=1e-8) / largest


def spread(groups: Tensor, group: int) -> Tensor:
    """[rows, columns] of a value per group."""
    return groups.repeat_interleave(group, 1)


def pack(codes: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int32 words along `dim`, the first code in the lowest bits; with `order`, code `order[0]`."""
    num = 32 // bits
    last = codes.long().movedim(dim, -1)
    last = last.reshape(*last.shape[:-1], -1, num)
    if order is not None:
        last = last[..., list(order)]
    words = sum(last[..., i] << (bits * i) for i in range(num))
    assert isinstance(words, Tensor)
    return words.to(torch.int32).movedim(-1, dim).contiguous()


def fp8_rows(weight: Tensor, group: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and values."""
    scale = scales(weight, FP8_MAX, group or weight.shape[1])
    codes = (weight / spread(scale, group or weight.shape[1])).to(torch.float8_e4m3fn)
    return codes, scale, codes.float() * spread(scale, group or weight.shape[1])


def fp8_tensor(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale = weight.abs().max() / FP8_MAX
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return codes, scale, codes.float() * scale


def fp8_blocks(weight: Tensor, block: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = weight.shape
    padded = torch.zeros(-(-rows // block) * block, columns)
    padded[:rows] = weight
    blocks = padded.view(-1, block, columns // block, block)
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-8) / FP8_MAX
    whole = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)[:rows]
    codes = (weight / whole).to(torch.float8_e4m3fn)
    return codes, scale, codes.float() * whole


def integers(weight: Tensor, bits: int, group: int, dtype: torch.dtype, with_zero: bool) -> tuple[Tensor, ...]:
    """Codes from 0 to 2**bits - 1, scales of `dtype`, zeros, values."""
    largest = 2**bits - 1
    grouped = weight.view(weight.shape[0], -1, group)
    if with_zero:
        low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
        scale = ((high - low).clamp(min=1e-8) / largest).to(dtype)
        zero = (-low / scale.float()).round().clamp(1, largest)
    else:
        scale = scales(weight, (largest - 1) / 2, group).to(dtype)
        zero = torch.full(scale.shape, 2.0 ** (bits - 1))
    wide, zeros = spread(scale.float(), group), spread(zero, group)
    codes = (weight / wide + zeros).round().clamp(0, largest)
    return codes, scale, zero, (codes - zeros) * wide


def awq(weight: Tensor) -> tuple[Tensors, Tensor]:
    codes, scale, zero, values = integers(weight, 4, GROUP, torch.float16, with_zero=True)
    tensors = {
        "qweight": pack(codes.t(), 4, 1, AWQ_ORDER),
        "qzeros": pack(zero.t(), 4, 1, AWQ_ORDER),
        "scales": scale.t().contiguous(),
    }
    return tensors, values


def gptq(bits: int, desc_act: bool, with_zero: bool, offset: int) -> Callable[..., Any]:
    def quantize(weight: Tensor) -> tuple[Tensors, Tensor]:
        columns = torch.arange(weight.shape[1])
        # GPTQ takes the columns of the largest activations first; the largest weights stand for them here
        order = weight.square().sum(0).argsort(descending=True) if desc_act else columns
        codes, scale, zero, values = integers(weight[:, order], bits, GROUP, torch.float16, with_zero)
        g_idx = torch.empty(weight.shape[1], dtype=torch.int32)
        g_idx[order] = (columns // GROUP).to(torch.int32)
        own = torch.empty_like(order)
        own[order] = columns
        tensors = {
            "qweight": pack(codes[:, own].t(), bits, 0),
            "qzeros": pack(zero.t() - offset, bits, 1),
            "scales": scale.t().contiguous(),
            "g_idx": g_idx,
        }
        return tensors, values[:, own]

    return quantize


def compressed(group: int, with_zero: bool = False) -> Callable[..., Any]:
    """4 bits, packed."""

    def quantize(weight: Tensor) -> tuple[Tensors, Tensor]:
        codes, scale, zero, values = integers(weight, 4, group or weight.shape[1], torch.bfloat16, with_zero)
        tensors = {
            "weight_packed": pack(codes, 4, 1),
            "weight_scale": scale,
            "weight_shape": torch.tensor(weight.shape),
        }
        if with_zero:
            tensors["weight_zero_point"] = pack(zero, 4, 0)
        return tensors, values

    return quantize


def int8_rows(weight: Tensor) -> tuple[Tensors, Tensor]:
    codes, scale, zero, values = integers(weight, 8, weight.shape[1], torch.float32, with_zero=False)
    return {"weight": (codes - spread(zero, weight.shape[1])).to(torch.int8), "weight_scale": scale}, values


def stored(quantize: Callable[[Tensor], tuple[Tensor, ...]], scale_name: str, shape: Any = None) -> Callable[..., Any]:
    """With the names of a format. shape: of the scale."""

    def named(weight: Tensor) -> tuple[Tensors, Tensor]:
        codes, scale, values = quantize(weight)
        return {"weight": codes, scale_name: scale if shape is None else scale.reshape(shape)}, values

    return named


def fbgemm_fp8(weight: Tensor) -> tuple[Tensors, Tensor]:
    codes, scale, values = fp8_rows(weight)
    return {"weight": codes, "weight_scale": scale, "input_scale_ub": torch.tensor([1200.0])}, values


def mxfp4(experts: Tensor) -> tuple[Tensors, Tensor]:
    """A power of two per 32 columns, so that the largest of them is below 8, and 6 at most once it is rounded."""
    rows = experts.transpose(1, 2).contiguous()
    groups = rows.view(*rows.shape[:2], -1, 32)
    largest = groups.abs().amax(-1).clamp(min=2.0**-120)
    exponents = largest.log2().floor() - 2
    scaled = groups / exponents.exp2()[..., None]
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nearest = torch.bucketize(scaled.abs(), (table[1:] + table[:-1]) / 2)
    codes = nearest + 8 * (scaled < 0)
    values = table[nearest] * scaled.sign() * exponents.exp2()[..., None]
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return {"blocks": blocks, "scales": (exponents + 127).to(torch.uint8)}, values.flatten(2).transpose(1, 2)


def _scheme(form: str, inputs: bool, **weights: Any) -> dict[str, Any]:
    activations = {"num_bits": 8, "type": weights["type"], "strategy": "token", "dynamic": True, "symmetric": True}
    scheme: dict[str, Any] = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}}
    scheme["input_activations"] = activations if inputs else None
    groups = {"group_0": scheme}
    fixed = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "ignore": ["lm_head"]}
    return {**fixed, "format": form, "config_groups": groups}


def _gptq_config(bits: int, desc_act: bool, sym: bool, form: str) -> dict[str, Any]:
    fixed = {"quant_method": "gptq", "group_size": 128, "lm_head": False}
    return {**fixed, "bits": bits, "desc_act": desc_act, "sym": sym, "checkpoint_format": form}


_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
FORMATS = {
    "fp8": Format({"quant_method": "fp8", "activation_scheme": "dynamic"}, stored(fp8_tensor, "weight_scale", ())),
    "fbgemm-fp8": Format(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        fbgemm_fp8,
    ),
    "fp8-block": Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        stored(fp8_blocks, "weight_scale_inv"),
    ),
    "compressed-fp8": Format(
        _scheme("float-quantized", True, num_bits=8, type="float", strategy="channel"), stored(fp8_rows, "weight_scale")
    ),
    "compressed-fp8-tensor": Format(
        _scheme("float-quantized", True, num_bits=8, type="float", strategy="tensor"),
        stored(fp8_tensor, "weight_scale", (1,)),
    ),
    "compressed-fp8-block": Format(
        _scheme("float-quantized", True, num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
        stored(fp8_blocks, "weight_scale"),
    ),
    "compressed-int8": Format(_scheme("int-quantized", True, num_bits=8, type="int", strategy="channel"), int8_rows),
    "compressed-w4a16": Format(
        _scheme("pack-quantized", False, num_bits=4, type="int", strategy="group", group_size=128), compressed(128)
    ),
    "compressed-w4a16-asym": Format(
        _scheme("pack-quantized", False, num_bits=4, type="int", strategy="group", group_size=64, symmetric=False),
        compressed(64, with_zero=True),
    ),
    "compressed-w4a16-channel": Format(
        _scheme("pack-quantized", False, num_bits=4, type="int", strategy="channel"), compressed(0)
    ),
    "awq": Format(_AWQ, awq),
    "gptq": Format(_gptq_config(4, False, True, "gptq"), gptq(4, False, False, 1)),
    "gptq-desc-act": Format(_gptq_config(4, True, True, "gptq"), gptq(4, True, False, 1)),
    "gptq-asym": Format(_gptq_config(4, False, False, "gptq_v2"), gptq(4, False, True, 0)),
    "gptq-8bit": Format(_gptq_config(8, True, True, "gptq"), gptq(8, True, False, 1)),
}

EXPERT_FORMATS = {
    "mxfp4": Format({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, mxfp4, experts=True)
}


def write(source: Path, out: Path, form: str, dequantized: bool = False) -> None:
    """A checkpoint's folder in that format; dequantized: its values in fp32, as a plain checkpoint."""
    shutil.copytree(source, out, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    chosen = (FORMATS | EXPERT_FORMATS)[form]
    tensors: Tensors = {}
    for file in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            begin = chosen.stored_names(name)
            if begin is None:
                tensors[name] = tensor.float() if dequantized else tensor
                continue
            parts, values = chosen.quantize(tensor.float())
            if dequantized:
                tensors[name] = values.contiguous()
            else:
                tensors |= {f"{begin}{end}": part.contiguous() for end, part in parts.items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config |= {"dtype": "float32"} if dequantized else {"quantization_config": dict(chosen.config)}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="tools.quantize", description=__doc__.partition("\n")[0])
    parser.add_argument("source", help="an embedded model or a folder")
    parser.add_argument("out", type=Path)
    parser.add_argument("--format", choices=[*FORMATS, *EXPERT_FORMATS], required=True)
    parser.add_argument("--dequantized", action="store_true", help="write what the weights stand for, in fp32")
    arguments = parser.parse_args()
    write(
        Path(EMBEDDED.get(arguments.source, arguments.source)), arguments.out, arguments.format, arguments.dequantized
    )


if __name__ == "__main__":
    main()
