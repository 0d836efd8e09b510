"""A layer of experts with random weights, in the shape of a real model's, and the time of calls of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from baton_kernels.experts import ExpertWeights, Routing, experts, reference, route_rows
from baton_kernels.quantized_linear.reference import quantize_rows
from benchmarks.harness.ceilings import best_s
from benchmarks.harness.checks import WrongAnswers

Stored = Literal["bfloat16", "fp8", "mxfp4"]
"""How weights are stored; "bfloat16": as the rest of the layer."""
LARGEST_ERROR = 0.02
"""Of a token's result, in the norm: the kernels and the reference both round gates and parts to 16 bits."""
LARGEST_FP8_ERROR = 0.1


@dataclass(frozen=True, slots=True)
class Shape:
    """clamped: the experts are gpt-oss's: with biases, gate and up interleaved, and their own gate."""

    hidden_size: int
    intermediate_size: int
    num_experts: int
    routing: Routing
    clamped: bool = False


SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 768, 128, Routing(8, normalized=True)),
    "gpt-oss-20b": Shape(2880, 2880, 32, Routing(4, "chosen_softmax"), clamped=True),
}
QUICK = Shape(32, 32, 8, Routing(2, normalized=True))


@dataclass(frozen=True, slots=True)
class Layer:
    """router: [num_experts, hidden_size]."""

    shape: Shape
    router: Tensor
    weights: ExpertWeights

    @classmethod
    def random(cls, shape: Shape, device: torch.device, dtype: torch.dtype, stored: Stored = "bfloat16") -> Layer:
        torch.manual_seed(0)

        def drawn(*sizes: int) -> Tensor:
            numbers: Tensor = torch.randn(*sizes, device=device, dtype=dtype)
            return numbers.mul_(sizes[-1] ** -0.5)

        n, width, hidden = shape.num_experts, shape.intermediate_size, shape.hidden_size
        gate_up, down = drawn(n, 2 * width, hidden), drawn(n, hidden, width)
        scales: list[Tensor | None] = [None, None]
        if stored != "bfloat16":
            quantize = _quantized if stored == "fp8" else _four_bits
            (gate_up, scales[0]), (down, scales[1]) = quantize(gate_up), quantize(down)
        of = ExpertWeights(gate_up, down, gate_up_scale=scales[0], down_scale=scales[1])
        if shape.clamped:
            biases = drawn(n, 2 * width), drawn(n, hidden)
            of = replace(of, gate="clamped", interleaved=True, gate_up_bias=biases[0], down_bias=biases[1])
        return cls(shape, drawn(n, hidden) * 3, of)

    def inputs(self, num_tokens: int, number: int) -> Tensor:
        """[num_tokens, hidden_size], different ones for each number."""
        generator = torch.Generator(self.router.device).manual_seed(1000 * num_tokens + number)
        size = (num_tokens, self.shape.hidden_size)
        return torch.randn(size, device=self.router.device, generator=generator).to(self.router.dtype)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return route_rows(x, self.router, self.shape.routing, dtype=x.dtype)[1:]

    def __call__(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        return experts(x, ids, weights, self.weights)

    def check(self, num_tokens: int) -> float:
        """The largest error of a token. Raises WrongAnswers."""
        x = self.inputs(num_tokens, 0)
        weights, ids = self.route(x)
        expected = reference.experts(x, ids, weights, self.weights).float()
        error = float(((self(x).float() - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
        most = LARGEST_FP8_ERROR if self.weights.eight_bits else LARGEST_ERROR
        if not error <= most:
            raise WrongAnswers(f"{num_tokens} tokens: a result differs by {error:.3g} from the reference's")
        return error

    def num_hit(self, x: Tensor) -> int:
        """Experts that at least one token chose."""
        return int(torch.bincount(self.route(x)[1].flatten()).count_nonzero())

    def flops(self, num_tokens: int) -> float:
        of = self.weights
        return 6.0 * num_tokens * self.shape.routing.top_k * of.hidden_size * of.intermediate_size


def _quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[num_experts, rows, columns] in fp8, and [num_experts, rows]."""
    parts = [quantize_rows(expert, torch.float8_e4m3fn) for expert in weight]
    return torch.stack([values for values, _ in parts]), torch.stack([scale[:, 0] for _, scale in parts])


def _four_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Random codes in MXFP4, of about the weight's size: theirs is 2.9 on average."""
    num_experts, rows, columns = weight.shape
    codes = torch.randint(0, 256, (num_experts, rows, columns // 2), dtype=torch.uint8, device=weight.device)
    exponent = 127 + round(math.log2(columns**-0.5 / 2.9))
    scale = torch.full((num_experts, rows, columns // 32), exponent, dtype=torch.uint8, device=weight.device)
    return codes, scale


def mean_s(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Mean seconds of the calls, one after another; on a GPU in a CUDA graph, as a step runs them."""
    if device.type != "cuda":
        return best_s(lambda: [call() for call in calls], device) / len(calls)
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return best_s(graph.replay, device) / len(calls)
