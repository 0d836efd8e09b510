"""When the kernels of CUDA graphs begin late: `python -m benchmarks.engine.graph_gaps`, on a GPU.

A process's graphs are in one of two states, whatever they compute and whichever stream replays them: in the slow one,
each kernel begins 0.2 to 0.3 us later. What changes the state is kernels that are launched outside graphs, on a second
stream (docs/performance.md; https://github.com/pytorch/pytorch/issues/161104 shows it, too). This script launches such
kernels on one stream, replays a graph of small kernels in between, and prints when the time of a kernel has changed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field

from baton.settings import Settings, parse
from benchmarks.harness.checks import WrongAnswers
from benchmarks.harness.tables import Table

CHANGE = 0.05
"""What counts as a change; a state differs by 0.2."""
SINGLE = 32
"""So many launches are looked at one by one, and after that each time that there are a tenth more."""
REPLAYS = 5
TRIES = 4


class GapsSettings(Settings):
    """Measures how late the kernels of a CUDA graph begin, after launches outside graphs."""

    prog: ClassVar[str] = "benchmarks.engine.graph_gaps"

    on: Literal["default", "capture", "new"] = Field("default", description="the stream of the launches")
    before: int = Field(0, ge=0, description="such launches before the capture, on each of these streams")
    launches: int = Field(20_000, ge=1, description="such launches after it")
    kernels: int = Field(400, ge=1, description="kernels of the graph")
    graphs: int = Field(3, ge=1, description="such graphs; with one or two, launches after the capture change nothing")
    in_graphs: bool = Field(False, description="have each launch after the capture be one of a graph of one kernel")


class State(NamedTuple):
    """launches: outside the graph, since its capture. kernel_us: from the beginning of one kernel to that of the
    next."""

    launches: int
    kernel_us: float


def counts(most: int) -> Iterator[int]:
    """The numbers of launches after which to look, in ascending order; the last is `most`."""
    count = 0
    while count < most:
        count = min(most, count + max(1, count // 10 if count >= SINGLE else 1))
        yield count


def changes(states: Sequence[State]) -> list[State]:
    """The first of the states, and each that differs from the one before it in this list."""
    found: list[State] = []
    for state in states:
        if not found or abs(state.kernel_us / found[-1].kernel_us - 1) > CHANGE:
            found.append(state)
    return found


class Graph:
    """Captured kernels that add one to the same numbers each. numbers: those, before the first replay 0."""

    def __init__(self, kernels: int, capture_stream: Any) -> None:
        self._kernels = kernels
        self._events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        with torch.cuda.stream(capture_stream):
            self.numbers = torch.zeros(4096, device="cuda")
            self._graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            self._graph.capture_begin()
            for _ in range(kernels):
                self.numbers.add_(1)
            self._graph.capture_end()

    def launch(self) -> None:
        """On the current stream."""
        self._graph.replay()

    def check(self) -> None:
        """Raises WrongAnswers."""
        self.launch()
        found = (float(self.numbers.min()), float(self.numbers.max()))
        if found != (self._kernels, self._kernels):
            raise WrongAnswers(f"{self._kernels} kernels have added {found[0]} to {found[1]}")

    def kernel_us(self) -> float:
        """The least of several tries, each of several replays in a row."""
        begin, end = self._events
        best = float("inf")
        for _ in range(TRIES):
            begin.record()
            for _ in range(REPLAYS):
                self.launch()
            end.record()
            end.synchronize()
            best = min(best, begin.elapsed_time(end) / (REPLAYS * self._kernels) * 1e3)
        return best


@torch.inference_mode()
def run(settings: GapsSettings) -> list[State]:
    """All states that were looked at. Raises WrongAnswers."""
    streams: dict[str, Any] = {"default": torch.cuda.current_stream()}
    for name in ("capture", "new"):
        streams[name] = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    other = torch.zeros(4096, device="cuda")

    def repeat(launch: Callable[[], object], stream: Any, number: int) -> None:
        with torch.cuda.stream(stream):
            for _ in range(number):
                launch()
        torch.cuda.synchronize()

    for stream in streams.values():
        repeat(partial(other.add_, 1), stream, settings.before)
    graphs = [Graph(settings.kernels, streams["capture"]) for _ in range(settings.graphs)]
    launch = Graph(1, streams["capture"]).launch if settings.in_graphs else partial(other.add_, 1)
    graph = graphs[-1]
    graph.check()
    states = [State(0, graph.kernel_us())]
    for count in counts(settings.launches):
        repeat(launch, streams[settings.on], count - states[-1].launches)
        states.append(State(count, graph.kernel_us()))
    return states


def table(states: Sequence[State]) -> str:
    rows = [[str(state.launches), f"{state.kernel_us:.3f}"] for state in changes(states)]
    return Table(["after launches", "us a kernel"], rows).plain()


def main(args: Sequence[str] | None = None, measure: Callable[[GapsSettings], Sequence[State]] = run) -> int:
    """Prints the states between which there was a change, then a line of JSON."""
    settings = parse(GapsSettings, sys.argv[1:] if args is None else args)
    states = measure(settings)
    print(table(states))
    print(json.dumps({"benchmark": "graph_gaps", "on": settings.on, "before": settings.before, "states": states}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
