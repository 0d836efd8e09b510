"""A prefill and a decode node against the same GPUs as single nodes:
`python -m benchmarks.disaggregation --node "..."`.

Each set of nodes, one after the other, gets the same requests at the same times over HTTP (`streams`, which first
checks answers and times an empty round trip and requests on the idle cluster), with several seeds of arrivals: a
queue's tail depends on them. The table has each figure's median over the seeds, and its worst one. `--before` adds a
set, such as the pair with another policy. Then prompts of several lengths are sent one at a time: they measure the
handoff by its parts, and the time to the first token with either set. For an 8B shape on H200s, vLLM's figures for the
same requests are shown as well. Workloads of one shape at several rates also give the goodput: the highest rate at
which 90% of the requests, with the median seed, keep the limits.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field, field_validator

from baton.address import HostPort
from baton.settings import Settings, Sizes, parse
from baton.settings import load as load_settings
from benchmarks.harness.checks import NUM_COMPARED, WrongAnswers, check_concurrency
from benchmarks.harness.cluster import running_cluster
from benchmarks.harness.http_stream import Connection, RequestFailed
from benchmarks.harness.load import Load, Prompts
from benchmarks.harness.tables import Table
from benchmarks.serving import streams
from benchmarks.serving.vllm import COLUMNS, Figures, Reference, references

AT_ONCE = "--first-token prefill"
"""Flags of a second router, for prompts sent one at a time: the default, where no first token waits for the handoff."""
NUM_ALONE = 7
ALONE_OUTPUT = 8
CHECKED_INPUT, CHECKED_OUTPUT = 200, 16
GOOD_SHARE = 0.9
GOAL_HANDOFF_MS = {2048: 5.0, 8192: 8.0, 32768: 15.0}
GOAL_FIRST_TOKEN = 1.03
"""The time to the first token of a prompt on the idle pair, relative to that on a single node."""

_WORKLOAD = re.compile(r"(\d+)/(\d+)@([\d.]+)x(\d+):([\d.]+):([\d.]+)")


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests at random times: tokens in and out, requests per second, total number; limits in milliseconds for the
    first token and for the longest gap between two tokens."""

    input_len: int
    output_len: int
    rate: float
    num_prompts: int
    first_token_ms: float
    gap_ms: float

    @classmethod
    def parse(cls, text: str) -> Workload:
        """Parse IN/OUT@RATExCOUNT:TTFT:GAP. Raises ValueError."""
        if not (match := _WORKLOAD.fullmatch(text)):
            raise ValueError(f"must be IN/OUT@RATExCOUNT:TTFT:GAP, not {text!r}")
        sizes = [int(match[i]) for i in (1, 2, 4)]
        return cls(sizes[0], sizes[1], float(match[3]), sizes[2], float(match[5]), float(match[6]))

    @property
    def name(self) -> str:
        return f"{self.input_len}/{self.output_len}@{self.rate:g}"


class DisaggregationSettings(Settings):
    """Compares a prefill node and a decode node with two single nodes."""

    prog: ClassVar[str] = "benchmarks.disaggregation"

    node: str = Field("--device=auto", description="flags of both sets, as for baton-up: the model and its sizes")
    pair: str = Field(
        "--prefill 1 --decode 1 --transport ipc --first-token decode",
        description="flags of the first set; empty: none",
    )
    singles: str = Field(
        "--prefill 0 --decode 2 --max-num-batched-tokens 736", description="flags of the second; empty: none"
    )
    before: str = Field("", description="flags of one more set, as the first one was before a change; empty: none")
    workloads: str = Field(
        "1024/128@21.4x384:200:25,1024/128@30x384:200:25,8192/256@3x96:1000:100",
        description="IN/OUT@RATExCOUNT:TTFT:GAP,...: tokens, requests per second and in all, limits in ms; empty: none",
    )
    alone: Sizes = Field((2048, 8192, 32768), description="tokens of the prompts that come one at a time; empty: none")
    tie_tolerance: float = Field(1e-4, ge=0, description="as for benchmarks.serving.streams")
    seeds: str = Field("0,1,2,3,4", description="of the prompts and of their times, as N,N,...")

    @field_validator("seeds")
    @classmethod
    def _check_seeds(cls, seeds: str) -> str:
        seeds_of(seeds)
        return seeds

    @field_validator("workloads")
    @classmethod
    def _check_workloads(cls, workloads: str) -> str:
        workloads_of(workloads)
        return workloads


def seeds_of(text: str) -> list[int]:
    """Raises ValueError."""
    return [int(part) for part in text.split(",")]


def workloads_of(text: str) -> list[Workload]:
    """Raises ValueError."""
    return [Workload.parse(part) for part in text.split(",")] if text else []


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of one set. `serving`: those of `streams`, for each workload one per seed. `alone`: median milliseconds
    by name, for each prompt length; `at_once`: times to first tokens that do not wait for the handoff."""

    serving: list[list[dict[str, Any]]]
    alone: dict[int, dict[str, float]]
    at_once: dict[int, float]


async def run(settings: DisaggregationSettings) -> dict[str, Any]:
    """Check, measure, print the tables; returns the content of the JSON line."""
    sets = {"pair": settings.pair, "before": settings.before, "singles": settings.singles}
    sets = {name: flags for name, flags in sets.items() if flags}
    workloads = workloads_of(settings.workloads)
    measured = {name: await _measure(settings, workloads, flags) for name, flags in sets.items()}
    rows, behind = list[list[str]](), list[str]()
    for index, load in enumerate(workloads):
        lines = {name: of.serving[index] for name, of in measured.items()}
        published = references(next(iter(lines.values()))[0]["model"], load.input_len, load.output_len, load.rate)
        for name, own in lines.items():
            figures = medians([figures_of(line) for line in own])
            rows.append([load.name, name, *_texts(own), _attained(own)])
            behind += [f"{load.name} {cell}" for cell in cells_behind(name, figures, published)]
        rows += [[load.name, reference.name, *map(_text, reference.figures), ""] for reference in published]
    if workloads:
        print(Table(["load", "set", *COLUMNS, "within"], rows).plain())
    for cell in behind:
        print(f"not better: {cell}")
    goodput = {name: goodput_of(workloads, of.serving) for name, of in measured.items() if workloads}
    for name, rates in goodput.items():
        print(f"goodput of {name}: {', '.join(f'{shape}: {rate:g}/s' for shape, rate in rates.items()) or 'none'}")
    alone = _alone(measured)
    if alone:
        columns = max((list(row) for of in alone.values() for row in of.values()), key=len)
        rows = [
            [str(length), name, *(_text(row[column]) if column in row else "" for column in columns)]
            for name, of in alone.items()
            for length, row in of.items()
        ]
        print(Table(["tokens", "set", *columns], rows).plain())
    return {
        "benchmark": "disaggregation",
        "node": settings.node,
        "sets": sets,
        "workloads": settings.workloads,
        "seeds": seeds_of(settings.seeds),
        "serving": {name: of.serving for name, of in measured.items()},
        "goodput": goodput,
        "behind_vllm": behind,
        "alone": alone,
        "goals": {"handoff_ms": GOAL_HANDOFF_MS, "first_token_ratio": GOAL_FIRST_TOKEN},
    }


async def _measure(settings: DisaggregationSettings, workloads: Sequence[Workload], flags: str) -> Measured:
    async with running_cluster(f"{settings.node} {flags}", AT_ONCE) as cluster:
        serving, seeds = [], seeds_of(settings.seeds)
        for load in workloads:
            print(f"{flags}: {load.name}", file=sys.stderr, flush=True)
            request = {
                "request_rate": load.rate,
                "num_prompts": load.num_prompts,
                "input_len": load.input_len,
                "output_len": load.output_len,
                "goodput": f"ttft:{load.first_token_ms},gap:{load.gap_ms}",
                "tie_tolerance": settings.tie_tolerance,
            }
            serving.append(await streams.measure(load_settings(streams.StreamsSettings, request), cluster.http, seeds))
        alone, at_once = dict[int, dict[str, float]](), dict[int, float]()
        if not workloads:
            await _check(cluster.http, seeds[0], settings.tie_tolerance)
        for length in filter(None, settings.alone):
            alone[length] = await _one_at_a_time(seeds[0], cluster.http, length)
            at_once[length] = (await _one_at_a_time(seeds[0], cluster.more_http[0], length))["TTFT"]
        return Measured(serving, alone, at_once)


async def _check(address: HostPort, seed: int, tolerance: float) -> None:
    """Raises WrongAnswers. Whoever measures a workload does this by itself."""
    async with Connection(address) as connection:
        prompts = await Prompts.of(connection, seed)
    await check_concurrency(Load(address, prompts, CHECKED_INPUT, CHECKED_OUTPUT), NUM_COMPARED, tolerance)


async def _one_at_a_time(seed: int, address: HostPort, length: int) -> dict[str, float]:
    """Medians in ms: the time to the first token, and the handoff with its parts."""
    async with Connection(address) as connection:
        prompts = await Prompts.of(connection, seed + 1)
    load = Load(address, prompts, length, ALONE_OUTPUT)
    answers = [await load.one() for _ in range(NUM_ALONE)]

    def median(values: Sequence[float]) -> float:
        return round(statistics.median(values) * 1e3, 3)

    phases = {name.replace("_", " "): median([a.phase_s(name) for a in answers]) for name in streams.HANDOFF}
    return {"TTFT": median([answer.first_token_s for answer in answers]), **phases}


def figures_of(line: Mapping[str, Any]) -> Figures:
    """The figures in a result of `streams`."""
    names = (
        *(f"ttft_ms_p{p}" for p in (50, 90, 99)),
        *("tpot_ms_mean", "tpot_ms_p99"),
        *(f"itl_ms_p{p}" for p in (50, 90, 99)),
        "longest_gap_ms_p50",
    )
    return tuple(float(line[name]) for name in names)


def medians(runs: Sequence[Figures]) -> Figures:
    """Of each figure."""
    return tuple(statistics.median(values) for values in zip(*runs, strict=True))


def _texts(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """The median of each figure, with the worst in brackets if there are several seeds."""
    columns = list(zip(*map(figures_of, lines), strict=True))
    worst = [f" ({_text(max(values))})" if len(values) > 1 else "" for values in columns]
    return [_text(statistics.median(values)) + bad for values, bad in zip(columns, worst, strict=True)]


def _attained(lines: Sequence[Mapping[str, Any]]) -> str:
    shares = [float(line["attainment"]) for line in lines]
    return f"{statistics.median(shares):.0%}" + (f" ({min(shares):.0%})" if len(shares) > 1 else "")


def goodput_of(workloads: Sequence[Workload], serving: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    """By shape and limits, the highest rate that was kept, and all lower ones with it; none where even the lowest was
    not."""
    shapes = dict[str, list[tuple[float, bool]]]()
    for load, lines in zip(workloads, serving, strict=True):
        kept = statistics.median(float(line["attainment"]) for line in lines) >= GOOD_SHARE
        shape = f"{load.input_len}/{load.output_len} within {load.first_token_ms:g} and {load.gap_ms:g} ms"
        shapes.setdefault(shape, []).append((load.rate, kept))
    found = dict[str, float]()
    for shape, rates in shapes.items():
        for rate, _ in itertools.takewhile(lambda entry: entry[1], sorted(rates)):
            found[shape] = rate
    return found


def cells_behind(name: str, ours: Figures, published: Sequence[Reference]) -> list[str]:
    """The figures in which a set is not better than the vLLM reference for that set."""
    return [
        f"{name}: {column} {mine:.2f}, {reference.name} {theirs:g}"
        for reference in published
        if reference.beside == name
        for column, mine, theirs in zip(COLUMNS, ours, reference.figures, strict=True)
        if mine >= theirs
    ]


def _text(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"


def _alone(measured: Mapping[str, Measured]) -> dict[str, dict[int, dict[str, float]]]:
    """By set that hands over, then by prompt length: the handoff with its parts, and the times to the first token,
    which comes from the decode node or at once; and each of these relative to a single node, if there are some."""
    found = dict[str, dict[int, dict[str, float]]]()
    for name in (name for name in measured if name != "singles"):
        for length, row in measured[name].alone.items():
            phases = {phase: ms for phase, ms in row.items() if phase != "TTFT"}
            times = {"TTFT": row["TTFT"], "at once": measured[name].at_once[length]}
            if singles := measured.get("singles"):
                single = (singles.alone[length]["TTFT"] + singles.at_once[length]) / 2
                times |= {f"{of}, ratio": round(ms / single, 4) for of, ms in times.items()} | {"single": single}
            found.setdefault(name, {})[length] = phases | times
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Exits with 1 if an answer is wrong, or a request or the cluster fails."""
    settings = parse(DisaggregationSettings, argv)
    try:
        line = asyncio.run(run(settings))
    except* (WrongAnswers, RequestFailed, RuntimeError, OSError) as errors:
        sys.exit(f"{settings.prog}: {errors.exceptions[0]}")
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
