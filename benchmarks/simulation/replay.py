"""Replays a trace over simulated nodes with each placement policy: `python -m benchmarks.simulation.replay`.

Router and nodes are the real ones in one process and in virtual time; see docs/simulation.md.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from baton.settings import Settings, parse
from benchmarks.simulation.fleet import Fleet
from benchmarks.simulation.policies import make_router
from benchmarks.simulation.report import Limits, Report, markdown, median, report
from deploy.bench.trace import Entry, read_trace, write_trace
from deploy.bench.workloads import WORKLOADS, Shape
from router.policies import POLICIES
from router.requests.request_state import FirstToken


class ReplaySettings(Settings):
    """Replays a trace over simulated nodes with each placement policy, in virtual time."""

    prog: ClassVar[str] = "benchmarks.simulation.replay"

    prefill: int = Field(8, ge=0, description="prefill nodes; 0: decode nodes compute prompts themselves")
    decode: int = Field(8, ge=1, description="decode nodes")
    profile: str = Field("h200-8b", description="file with the times of a real node, or h200-8b")
    node: str = Field("", description="flags of all nodes, as for baton-decode: --target-itl 8")
    first_token: FirstToken = Field("prefill", description="as of baton-router")
    policy: str = Field(",".join(POLICIES), description="placement policies, one simulation each, as NAME,NAME,...")
    trace: Path | None = Field(None, description="trace in Mooncake's format; unset: one is made")
    workload: Literal["shared-prefix", "multi-turn", "uncorrelated"] = Field(
        "shared-prefix", description="what the made trace is like"
    )
    num_requests: int = Field(2000, ge=1, description="requests of the made trace; of a file at most so many are taken")
    rate: float = Field(40.0, gt=0, description="requests per second of the made trace")
    seeds: str = Field(
        "0", description="of the made trace, as N,N,...: one simulation each, of which the table has medians"
    )
    input_len: int = Field(1024, ge=1, description="mean tokens that a request of the made trace has for itself")
    output_len: int = Field(128, ge=1, description="mean tokens of its answer")
    prefix_len: int = Field(4096, ge=512, description="tokens of each prefix that requests share")
    num_prefixes: int = Field(64, ge=1, description="such prefixes")
    num_turns: int = Field(6, ge=1, description="turns of a session")
    write_trace: Path | None = Field(None, description="also write the trace to this file")
    slo_ttft: float = Field(0.2, gt=0, description="seconds to the first token of a good answer")
    slo_gap: float = Field(0.025, gt=0, description="seconds between any two tokens of a good answer")

    @field_validator("policy")
    @classmethod
    def _check_policy(cls, policy: str) -> str:
        if unknown := [name for name in policy.split(",") if name not in POLICIES]:
            raise ValueError(f"{', '.join(unknown)}: must be among {', '.join(POLICIES)}")
        return policy


def traces_of(settings: ReplaySettings) -> list[list[Entry]]:
    """Raises ValueError, OSError."""
    return [_trace_of(settings, int(seed)) for seed in ("0" if settings.trace else settings.seeds).split(",")]


def _trace_of(settings: ReplaySettings, seed: int) -> list[Entry]:
    if settings.trace is not None:
        return read_trace(settings.trace)[: settings.num_requests]
    shape = Shape(
        num_requests=settings.num_requests,
        per_s=settings.rate,
        seed=seed,
        input_len=settings.input_len,
        output_len=settings.output_len,
        prefix_len=settings.prefix_len,
        num_prefixes=settings.num_prefixes,
        num_turns=settings.num_turns,
    )
    return WORKLOADS[settings.workload](shape)


def simulate(settings: ReplaySettings, policy: str, entries: Sequence[Entry]) -> Report:
    router = partial(make_router, policy, settings.prefill, settings.first_token)
    fleet = Fleet(settings.prefill, settings.decode, settings.profile, router, shlex.split(settings.node))
    answers = fleet.replay(entries)
    return report(answers, settings.prefill, settings.decode, Limits(settings.slo_ttft, settings.slo_gap))


def main(argv: Sequence[str] | None = None) -> None:
    settings = parse(ReplaySettings, argv)
    try:
        traces = traces_of(settings)
    except (ValueError, OSError) as error:
        raise SystemExit(f"{settings.prog}: {error}") from None
    if settings.write_trace is not None:
        write_trace(settings.write_trace, traces[0])
    rows = {}
    for policy in settings.policy.split(","):
        began = time.monotonic()
        rows[policy] = median([simulate(settings, policy, entries) for entries in traces])
        print(f"{policy}: {time.monotonic() - began:.0f} s", file=sys.stderr)
        line = {"benchmark": "simulate", "policy": policy, **dataclasses.asdict(rows[policy])}
        print(json.dumps({key: round(value, 4) if isinstance(value, float) else value for key, value in line.items()}))
    print(markdown(rows), flush=True)


if __name__ == "__main__":
    main()
