"""The time of a layer of experts, from hidden states to the sum of the experts: `python -m benchmarks.layers.experts`.

The floor is the longer of the times to read the experts that the tokens chose, at the read bandwidth of the same run,
and to multiply, at its sustained matmul speed. Calls follow one another in a CUDA graph, each with other tokens, so
that few of a call's weights are in L2. transformers: its own experts for the same choices, those of the implementation
that it chooses by itself.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, ClassVar

import torch
from pydantic import Field, field_validator

from baton.settings import Settings, parse
from baton_kernels.experts import experts
from benchmarks.harness import ceilings
from benchmarks.harness.checks import WrongAnswers
from benchmarks.harness.tables import Table
from benchmarks.layers.random_experts import QUICK, SHAPES, Layer, Stored, mean_s

NUM_CALLS = 16


class ExpertsSettings(Settings):
    """Measures a layer of experts."""

    prog: ClassVar[str] = "benchmarks.layers.experts"

    shapes: str = Field(",".join(SHAPES), description="models whose layers to measure, separated by commas")
    tokens: str = Field("1,2,8,32,128,256,512,2048,8192", description="tokens of a call, as N,N,...")
    weights: Stored = Field("bfloat16", description="how the experts' weights are stored")
    transformers: bool = Field(True, description="measure transformers' experts, too, if weights are in bfloat16")
    quick: bool = Field(False, description="sizes that a CPU can do in seconds: does it run?")

    @field_validator("shapes")
    @classmethod
    def _check_shapes(cls, shapes: str) -> str:
        if unknown := set(shapes.split(",")) - SHAPES.keys():
            raise ValueError(f"{', '.join(sorted(unknown))}: not among {', '.join(SHAPES)}")
        return shapes

    @field_validator("tokens")
    @classmethod
    def _check_tokens(cls, tokens: str) -> str:
        if not all(part.isdigit() and int(part) for part in tokens.split(",")):
            raise ValueError(f"must be N,N,... not {tokens!r}")
        return tokens


def measure(layer: Layer, num_tokens: int, bounds: ceilings.Ceilings, compare: bool) -> dict[str, Any]:
    """Raises WrongAnswers."""
    device = layer.router.device
    error = layer.check(num_tokens)
    inputs = [layer.inputs(num_tokens, number) for number in range(NUM_CALLS)]
    routed = [layer.route(x) for x in inputs]
    hit = sum(layer.num_hit(x) for x in inputs) / NUM_CALLS
    read_s = hit * layer.weights.expert_bytes / bounds.read_bytes_per_s
    multiply_s = layer.flops(num_tokens) / bounds.sustained_matmul_flops_per_s
    whole = mean_s([partial(layer, x) for x in inputs], device)
    alone = mean_s([partial(experts, x, i, w, layer.weights) for x, (w, i) in zip(inputs, routed, strict=True)], device)
    routing = mean_s([partial(layer.route, x) for x in inputs], device)
    floor = max(read_s, multiply_s)
    return {
        "num_tokens": num_tokens,
        "num_hit": round(hit, 1),
        "layer_us": round(whole * 1e6, 2),
        "experts_us": round(alone * 1e6, 2),
        "routing_us": round(routing * 1e6, 2),
        "read_floor_us": round(read_s * 1e6, 2),
        "multiply_floor_us": round(multiply_s * 1e6, 2),
        "ratio": round(whole / floor, 3),
        "tflops": round(layer.flops(num_tokens) / alone / 1e12, 1),
        "transformers_us": _theirs_us(layer, inputs, routed) if compare else None,
        "largest_error": round(error, 5),
    }


def _theirs_us(layer: Layer, inputs: list[torch.Tensor], routed: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """transformers' grouped products, over the same weights."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    of = layer.weights

    class Theirs(torch.nn.Module):
        num_experts, has_gate, has_bias, is_transposed = of.num_experts, True, of.down_bias is not None, False
        has_post_expert_norm = _is_expert_parallel = False
        gate_up_proj, down_proj = of.gate_up, of.down
        gate_up_proj_bias, down_proj_bias = of.gate_up_bias, of.down_bias

        def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
            gate, up = (gate_up[..., ::2], gate_up[..., 1::2]) if of.interleaved else gate_up.chunk(2, dim=-1)
            if of.gate != "clamped":
                return torch.nn.functional.silu(gate) * up
            gate, up = gate.clamp(max=of.limit), up.clamp(-of.limit, of.limit)
            return (up + 1) * gate * torch.sigmoid(gate * of.alpha)

    module: Any = Theirs()
    calls = [partial(grouped_mm_experts_forward, module, x, i, w) for x, (w, i) in zip(inputs, routed, strict=True)]
    return round(mean_s(calls, layer.router.device) * 1e6, 2)


def as_table(rows: Sequence[dict[str, Any]]) -> Table:
    columns = {
        "num_tokens": "tokens",
        "num_hit": "experts hit",
        "layer_us": "layer us",
        "ratio": "x floor",
        "read_floor_us": "read floor",
        "multiply_floor_us": "multiply floor",
        "experts_us": "experts",
        "routing_us": "routing",
        "tflops": "TFLOP/s",
        "transformers_us": "transformers",
    }
    cells = [["-" if row[name] is None else str(row[name]) for name in columns] for row in rows]
    return Table(list(columns.values()), cells)


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> None:
    settings = parse(ExpertsSettings, argv)
    device = torch.device("cuda" if torch.cuda.is_available() and not settings.quick else "cpu")
    sizes = {"num_bytes": ceilings.QUICK_NUM_BYTES, "matmul_size": ceilings.QUICK_MATMUL_SIZE} if settings.quick else {}
    fp8, plain = settings.weights == "fp8", settings.weights == "bfloat16"
    bounds = ceilings.measure(
        device, **sizes, matmul_dtype=torch.float8_e4m3fn if fp8 and device.type == "cuda" else None
    )
    print(bounds)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shapes = {"quick": QUICK} if settings.quick else {name: SHAPES[name] for name in settings.shapes.split(",")}
    tokens = [1, 5, 40] if settings.quick else [int(part) for part in settings.tokens.split(",")]
    by_shape: dict[str, Any] = {}
    for name, shape in shapes.items():
        layer = Layer.random(shape, device, dtype, settings.weights)
        by_shape[name] = []
        for num_tokens in tokens:
            try:
                by_shape[name].append(measure(layer, num_tokens, bounds, settings.transformers and plain))
            except WrongAnswers as error:
                sys.exit(f"{settings.prog}: {name}: {error}")
        print(f"\n{name}, weights in {settings.weights}")
        print(as_table(by_shape[name]).plain(), flush=True)
    line = {"benchmark": "experts", "weights": settings.weights, "ceilings": asdict(bounds), "shapes": by_shape}
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
