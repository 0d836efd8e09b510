"""What the sums of a divided layer take: `python -m benchmarks.layers.rank_sums`, with a process for each GPU.

Two tables, after the answers have been checked: the sum, the residual addition and the norm after it as separate
kernels and as one; and the rows of a prompt in a layer without attention, whose sums and norms all ranks make, or each
rank of some rows, in pieces (`engine/model/parallel/sequence_parallel.py`), beside the products alone. Calls follow one
another in a CUDA graph; the time of one is what rank 0 sees. What fails is printed, and the rest goes on.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from baton.settings import Settings, parse
from baton_kernels.all_reduce_rms_norm import all_reduce_rms_norm
from baton_kernels.reduce_rms_norm import Parts, reduce_rms_norm
from baton_kernels.rms_norm import reference, rms_norm
from benchmarks.harness.checks import WrongAnswers
from benchmarks.harness.tables import Table
from engine.model.linear_method import UnquantizedLinear
from engine.model.parallel.group import GlooRanks, RankGroup
from engine.model.parallel.sequence_parallel import SequenceParallel
from engine.model.tolerance import close

EPS = 1e-5
REPLAYS = 4
Call = Callable[[], Tensor]
Row = dict[str, Any]


class SumsSettings(Settings):
    """Measures sums over ranks with what comes before and after them."""

    prog: ClassVar[str] = "benchmarks.layers.rank_sums"

    device: Literal["cpu", "cuda"] = Field("cuda", description="where the ranks compute; cpu: to try this script")
    ranks: int = Field(2, ge=2, description="GPUs, one process each")
    widths: str = Field("4096,8192", description="features of a row that a norm follows")
    rows: str = Field("1,8,32,64,128,256,512,1024", description="rows of such sums")
    inputs: str = Field("2048,7168", description="input features of a layer's o and down")
    outputs: int = Field(4096, ge=1, description="output features of both")
    prompts: str = Field("2048,8192", description="rows of the layer")
    pieces: str = Field("1,2,4", description="into how many pieces to divide them")
    calls: int = Field(20, ge=1, description="calls in a graph")
    limit_s: float = Field(60, gt=0, description="ranks that have not ended by then are killed")


class Bench:
    """One rank. rows: what it has measured."""

    def __init__(self, settings: SumsSettings, group: RankGroup, device: torch.device) -> None:
        self._settings, self.group, self.device = settings, group, device
        self.rank, self.rows, self._dtype = group.rank, list[Row](), torch.bfloat16

    @torch.inference_mode()
    def run(self) -> None:
        settings = self._settings
        for width in _numbers(settings.widths):
            for num_rows in _numbers(settings.rows):
                self._try({"rows": num_rows, "width": width}, self._norm, num_rows, width)
        for num_rows in _numbers(settings.prompts):
            self._try({"rows": num_rows, "outputs": settings.outputs}, self._layer, num_rows)

    def _try(self, what: Row, measure: Callable[..., Row], *sizes: int) -> None:
        try:
            row = what | measure(*sizes)
        except Exception as error:  # noqa: BLE001 - the others may succeed
            row = what | {"failed": f"{type(error).__name__}: {error}"}
            print(f"rank {self.rank}: {row}", file=sys.stderr, flush=True)
        self.rows.append(row)
        if self.rank == 0:
            print({name: round(value, 2) if isinstance(value, float) else value for name, value in row.items()})
            sys.stdout.flush()

    def _norm(self, num_rows: int, width: int) -> Row:
        parts = [self._random(num_rows, width, seed=rank) for rank in range(self.group.size)]
        residual, weight = self._random(num_rows, width, seed=20), self._random(1, width, seed=21)[0]
        x, group = parts[self.rank].clone(), self.group
        takes = group.norms_sum(num_rows, width * x.itemsize)

        def separate() -> Tensor:
            return rms_norm(group.all_reduce(x), weight, EPS, residual=residual)

        def fused() -> Tensor:
            return all_reduce_rms_norm(x, weight, EPS, group.all_reduce, group.peers, residual=residual)

        before, total = residual.clone(), torch.stack([part.float() for part in parts]).sum(0).to(x.dtype)
        for call in (separate, fused) if takes else (separate,):
            for _ in range(3):  # so that both halves of the memory in common are used, and again
                x.copy_(parts[self.rank])
                residual.copy_(before)
                after = before.clone()
                expected = reference.rms_norm(total, weight, EPS, after, 0.0, False)
                self._check(call(), expected)
                self._check(residual, after)
        x.zero_()  # some sums overwrite it
        separate_us = self._us(separate)
        if not takes:
            return {"separate_us": separate_us}
        fused_us = self._us(fused)
        x.copy_(parts[self.rank])
        residual.copy_(before)
        self._check(fused(), expected)  # after the graph's calls
        return {"separate_us": separate_us, "fused_us": fused_us, "ratio": fused_us / separate_us}

    def _layer(self, num_rows: int) -> Row:
        settings = self._settings
        o_inputs, inputs = _numbers(settings.inputs)
        layer = Layer(self.group, self._random, num_rows, settings.outputs, o_inputs, inputs)
        expected = layer.exact()
        layer.reset()
        self._check(layer.whole(), expected)
        row: Row = {"products_us": self._us(layer.products), "whole_us": self._us(layer.whole)}
        rows = layer.share_rows()
        if rows is None or not rows.takes(num_rows):
            return row
        for number in _numbers(settings.pieces):
            rows.most_pieces = number
            for _ in range(3):
                layer.reset()
                self._check(layer.divided(), expected)
            row[f"pieces_{number}_us"] = self._us(layer.divided)
        return row

    def _check(self, found: Tensor, expected: Tensor) -> None:
        """Raises WrongAnswers, on all ranks or on none."""
        if not self.group.minimum(int(close(found, expected))):
            error = float((found.float() - expected.float()).abs().max())
            raise WrongAnswers(f"off by up to {error:.3g}")
        ranks = self.group.all_gather(found.reshape(-1)).view(self.group.size, -1)
        if not all(torch.equal(ranks[0], other) for other in ranks[1:]):
            raise WrongAnswers("the ranks' results differ")

    def _us(self, call: Call) -> float:
        """Of one call among many, the median of five times: by how much several replays take longer than one, since
        the ranks do not start at the same time."""
        replay, calls = self._repeated(call)
        took = []
        for _ in range(6):
            took.append((self._s(replay, REPLAYS + 1) - self._s(replay, 1)) / (REPLAYS * calls) * 1e6)
        return sorted(took[1:])[2]

    def _s(self, replay: Callable[[], object], number: int) -> float:
        """Seconds that so many replays take, from when all ranks are there."""
        self._synchronize()
        self.group.minimum(0)
        began = time.perf_counter()
        for _ in range(number):
            replay()
        self._synchronize()
        return time.perf_counter() - began

    def _repeated(self, call: Call) -> tuple[Callable[[], object], int]:
        """A function that makes so many calls, and their number."""
        if self.device.type == "cpu":
            return call, 1
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")  # threads of NCCL look for the ends of sums
            for _ in range(self._settings.calls):
                call()
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return graph.replay, self._settings.calls

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _random(self, *shape: int, seed: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)  # with a GPU's numbers, the same on all
        return torch.randn(shape, generator=generator, device=self.device).to(self._dtype)


class Layer:
    """This rank's part of a layer without attention: o, norm, up, down, norm. random: makes tensors of a shape, from a
    seed."""

    def __init__(
        self, group: RankGroup, random: Callable[..., Tensor], num_rows: int, width: int, o_inputs: int, inputs: int
    ) -> None:
        self._group, rank = group, group.rank
        self._x, self._before = random(1, num_rows, o_inputs, seed=rank), random(1, num_rows, width, seed=20)
        self._residual, self._weight = self._before.clone(), random(1, width, seed=21)[0]
        o, up, down = (
            UnquantizedLinear(random(outputs, of, seed=seed + rank) / of**0.5, None)
            for seed, outputs, of in ((30, width, o_inputs), (40, inputs, width), (50, width, inputs))
        )
        self._o, self._up, self._down = o.make_product(), up.make_product(), down.make_product()
        self._o_into, self._rows = o.make_product_into(), group.share_rows(width, self._x.dtype)

    def share_rows(self) -> SequenceParallel | None:
        """What divides the rows, any number of them: they are launched as a CUDA graph."""
        if self._rows is not None:
            self._rows.launched_bytes = 0
        return self._rows

    def reset(self) -> None:
        """To the residual before the layer."""
        self._residual.copy_(self._before)

    def products(self) -> Tensor:
        return self._down(self._up(self._o(self._x)))

    def whole(self) -> Tensor:
        """All ranks sum and norm all rows."""
        y = self._normed(self._group.all_reduce(self._o(self._x)))
        return self._normed(self._group.all_reduce(self._down(self._up(y))))

    def divided(self) -> Tensor:
        """Each rank sums and norms its own rows."""
        rows, width = self._rows, len(self._weight)
        assert rows is not None
        num_rows = self._x.shape[1]
        parts = self._x.new_empty(num_rows, width)
        rows.begin(num_rows)
        rows.then(self._norm_own)
        for index, piece in enumerate(rows.pieces):
            self._o_into(self._x[0, piece], parts[piece])
            rows.send(index, parts[piece])
        rows.then(self._norm_own)
        for index in range(len(rows.pieces)):
            rows.send(index, self._down(self._up(rows.take(index))))
        return rows.end()

    def exact(self) -> Tensor:
        """From sums that are rounded once."""
        return self._exact(self._down(self._up(self._exact(self._o(self._x)))))

    def _exact(self, part: Tensor) -> Tensor:
        total = self._group.all_reduce(part.float()).to(part.dtype)
        return reference.rms_norm(total, self._weight, EPS, self._residual, 0.0, False)

    def _normed(self, x: Tensor) -> Tensor:
        return rms_norm(x, self._weight, EPS, residual=self._residual)

    def _norm_own(self, parts: Parts, own: slice, out: Tensor) -> None:
        reduce_rms_norm(parts, self._weight, EPS, out, residual=self._residual[0, own])


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _bench(settings: SumsSettings, rank: int, meeting: Path) -> Bench:
    host = GlooRanks(FileStore(str(meeting), settings.ranks), rank, settings.ranks)
    if settings.device == "cpu":
        torch.set_num_threads(1)
        return Bench(settings, host, torch.device("cpu"))
    from engine.model.parallel.gpus import GpuRanks

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return Bench(settings, GpuRanks(host, device).part(settings.ranks), device)


def _measure(settings: SumsSettings, rank: int, meeting: Path, rows: Any) -> None:
    """A rank's process. rows: takes what rank 0 has measured."""
    bench = _bench(settings, rank, meeting)
    bench.run()
    if rank == 0:
        rows.put(bench.rows)
    bench.group.minimum(0)
    sys.stderr.flush()
    os._exit(0)  # no rank waits for another to take NCCL apart


def _table(rows: list[Row], has: str) -> str:
    those = [row for row in rows if has in row and "failed" not in row]
    names = list(those[0]) if those else []
    return Table(names, [[f"{row.get(name, float('nan')):.4g}" for name in names] for row in those]).plain()


def main(args: Sequence[str] | None = None) -> int:
    """Prints rows as they are measured, the tables, and then a line of JSON. 1: something failed."""
    settings = parse(SumsSettings, sys.argv[1:] if args is None else args)
    context = multiprocessing.get_context("spawn")
    rows: Any = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "meeting"
        ranks = [
            context.Process(target=_measure, args=(settings, rank, meeting, rows), daemon=True)
            for rank in range(settings.ranks)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + settings.limit_s
        for rank, process in enumerate(ranks):
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                print(f"rank {rank} has not ended", file=sys.stderr)
                process.kill()
                process.join()
    if ranks[0].exitcode:
        return 1
    found = rows.get()
    for has in ("width", "outputs"):
        print(_table(found, has))
    print(json.dumps({"benchmark": "rank_sums", "ranks": settings.ranks, "rows": found}))
    return int(any("failed" in row for row in found) or any(process.exitcode for process in ranks))


if __name__ == "__main__":
    raise SystemExit(main())
