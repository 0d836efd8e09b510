"""The fastest tilings of a layer of experts: `python -m benchmarks.layers.experts_tune`; for the table of
`baton_kernels.experts.tiling`.

Each of the two products is measured alone, in a CUDA graph of calls with other tokens, for all candidates that fit into
an SM, once for each number of rows that a block may have. The whole layer is what counts, so the best of each number of
rows are listed with the time of all kernels of a layer.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from baton.settings import Settings, parse
from baton_kernels.experts import in_blocks, rows_kernel
from baton_kernels.experts.alignment_kernel import Blocks, align
from baton_kernels.experts.kernel import down, gate_up
from baton_kernels.experts.sum_kernel import summed
from baton_kernels.experts.tiling import CLASSES, ROW, ROW_TOKENS, RowTiling, RowTilings, Tiling, Tilings
from benchmarks.harness.tables import Table
from benchmarks.layers.random_experts import SHAPES, Layer, mean_s

SM_BYTES = 227 * 1024
NUM_CALLS = 8
NUM_SHOWN = 4
GROUP = 8
"""Blocks side by side. With all of them, programs of blocks that do not exist start between the others."""


class TuneSettings(Settings):
    """Measures candidates for the tilings of a layer of experts, on a GPU."""

    prog: ClassVar[str] = "benchmarks.layers.experts_tune"

    shapes: str = Field(",".join(SHAPES), description="models whose layers to measure, separated by commas")
    tokens: str = Field("1,8,32,256,1024,8192", description="tokens of a call, as N,N,...")


@dataclass(frozen=True, slots=True)
class Case:
    """Calls of a layer, with the same number of tokens each."""

    layer: Layer
    inputs: list[Tensor]
    routed: list[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, layer: Layer, num_tokens: int) -> Case:
        inputs = [layer.inputs(num_tokens, number) for number in range(NUM_CALLS)]
        return cls(layer, inputs, [layer.route(x) for x in inputs])

    def blocks(self, rows: int) -> list[Blocks]:
        return [align(ids, None, self.layer.shape.num_experts, rows) for _, ids in self.routed]

    def us(self, calls: Sequence[Callable[[], object]]) -> float:
        """Infinity for what does not compile or fit."""
        try:
            return round(mean_s(calls, self.inputs[0].device) * 1e6, 2)
        except Exception as error:  # noqa: BLE001 - whatever Triton raises: the next candidate may do
            sys.stderr.write(f"{type(error).__name__}: {str(error)[:100]}\n")
            return float("inf")

    def gate_up_us(self, tiling: Tiling, blocks: list[Blocks]) -> float:
        of, (num_tokens, top_k) = self.layer.weights, self.routed[0][1].shape
        one = partial(gate_up, num_choices=num_tokens * top_k, top_k=top_k, tiling=tiling, dtype=self.inputs[0].dtype)
        return self.us(
            [partial(one, x, None, of, placed) for x, placed in zip(self.inputs, blocks, strict=True)],
        )

    def down_us(self, tiling: Tiling, blocks: list[Blocks]) -> float:
        of, dtype = self.layer.weights, self.inputs[0].dtype
        rows = [
            torch.randn(placed.most * placed.rows, of.intermediate_size, device=x.device, dtype=dtype)
            for x, placed in zip(self.inputs, blocks, strict=True)
        ]
        calls = zip(rows, blocks, self.routed, strict=True)
        return self.us([partial(down, x, None, of, placed, w, tiling, dtype) for x, placed, (w, _) in calls])

    def layer_us(self, tilings: Tilings | RowTilings) -> float:
        calls = zip(self.inputs, self.routed, strict=True)
        of = self.layer.weights
        if isinstance(tilings, RowTilings):
            return self.us([partial(rows_kernel.experts, x, i, w, of, None, tilings) for x, (w, i) in calls])

        def layer(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            return summed(in_blocks(x, ids, weights, of, None, tilings))

        return self.us([partial(layer, x, i, w) for x, (w, i) in calls])


def candidates(rows: int, matrices: int) -> list[Tiling]:
    """All that fit into an SM, with sums that fit into registers."""
    found = []
    for out, depth, warps, stages in itertools.product((32, 64, 128, 256), (64, 128), (4, 8), (3, 4, 5)):
        num_bytes = stages * depth * (matrices * out + rows) * 2
        sums = matrices * out * rows / (32 * warps)
        if num_bytes <= SM_BYTES and sums <= 128 and (rows >= 64 or out <= 128) and out * warps >= 256:
            found.append(Tiling(rows, out, depth, warps, stages, GROUP))
    return found


def rows_to_try(num_tokens: int, mean: float) -> list[int]:
    return [rows for rows in (8, 16, 32, 64, 128) if rows <= 2 * num_tokens and mean / 4 <= rows <= max(16.0, 4 * mean)]


def tune_blocks(case: Case) -> list[dict[str, Any]]:
    num_tokens, top_k = case.routed[0][1].shape
    mean = num_tokens * top_k / case.layer.shape.num_experts
    known = next(tilings for most, tilings in CLASSES if mean <= most)
    timed: list[dict[str, Any]] = []
    for rows in rows_to_try(num_tokens, mean):
        blocks = case.blocks(rows)
        firsts = sorted((case.gate_up_us(t, blocks), str(t), t) for t in candidates(rows, 2))[:NUM_SHOWN]
        seconds = sorted((case.down_us(t, blocks), str(t), t) for t in candidates(rows, 1))[:NUM_SHOWN]
        for (first_us, _, first), (second_us, _, second) in zip(firsts, seconds, strict=False):
            whole = case.layer_us(replace(known, gate_up=first, down=second))
            timed.append({"us": whole, "gate_up": str(first), "gate_up_us": first_us, "down": str(second)})
            timed[-1]["down_us"] = second_us
    timed.append({"us": case.layer_us(known), "gate_up": "as it is", "down": "as it is"})
    return sorted(timed, key=lambda row: float(row["us"]))


def tune_rows(case: Case) -> list[dict[str, Any]]:
    timed: list[dict[str, Any]] = []
    options = list(itertools.product((2, 4, 8, 16), (128, 256, 512), (2, 4, 8), (3, 5)))
    for pick in ("gate_up", "down"):
        for values in options:
            tiling = RowTiling(*values)
            tilings = RowTilings(tiling, ROW.down) if pick == "gate_up" else RowTilings(ROW.gate_up, tiling)
            timed.append({"us": case.layer_us(tilings), pick: str(tiling)})
    timed.append({"us": case.layer_us(ROW), "gate_up": "as it is", "down": "as it is"})
    best = sorted(timed, key=lambda row: float(row["us"]))
    return [*[row for row in best if "down" not in row][:8], *[row for row in best if "down" in row][:8]]


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> None:
    settings = parse(TuneSettings, argv)
    if not torch.cuda.is_available():
        sys.exit(f"{settings.prog}: needs a GPU")
    by_shape: dict[str, Any] = {}
    for name in settings.shapes.split(","):
        layer = Layer.random(SHAPES[name], torch.device("cuda"), torch.bfloat16)
        for num_tokens in map(int, settings.tokens.split(",")):
            case = Case.of(layer, num_tokens)
            rows = tune_rows(case) if num_tokens <= ROW_TOKENS else tune_blocks(case)
            by_shape[f"{name} {num_tokens}"] = rows
            print(f"\n{name}, {num_tokens} tokens")
            columns = ["us", "gate_up", "gate_up_us", "down", "down_us"]
            print(Table(columns, [[str(row.get(key, "-")) for key in columns] for row in rows]).plain(), flush=True)
    print(json.dumps({"benchmark": "experts_tune", "shapes": by_shape}), flush=True)


if __name__ == "__main__":
    main()
