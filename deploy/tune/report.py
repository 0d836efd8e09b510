"""What was measured, and what to change."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deploy.tune.figures import POOLS, Figures, Pool
from deploy.tune.rules import Proposal

NOTHING = "nothing to change"
_POOL_ROWS = tuple(field.name for field in dataclasses.fields(Pool))
_SHARES = frozenset({"kv_blocks", "seats", "device", "gap", "prompt_steps", "preemptions", "slots"})


def print_report(figures: Figures, proposals: Sequence[Proposal], missing: Mapping[str, str], console: Console) -> None:
    console.print(_requests(figures))
    console.print(_pools(figures))
    for source, reason in missing.items():
        console.print(f"not read: {source}: {reason}", style="yellow", markup=False)
    if not figures.num_requests:
        console.print("no request ended: run it under load, as with baton bench", style="yellow")
    if not proposals:
        console.print(NOTHING, style="green")
    for proposal in proposals:
        console.print(Text.assemble((f"{proposal.setting}: ", "bold"), proposal.change))
        console.print(Text(f"   {proposal.why}"))


def as_json(figures: Figures, proposals: Sequence[Proposal], missing: Mapping[str, str]) -> str:
    stated = {
        "figures": dataclasses.asdict(figures),
        "proposals": [dataclasses.asdict(proposal) for proposal in proposals],
        "missing": dict(missing),
    }
    return json.dumps(stated, indent=2)


def _requests(figures: Figures) -> Text:
    when = "in the time of the pages" if figures.seconds is None else f"in {figures.seconds:.0f} s"
    lines = [f"{figures.num_requests} requests ended {when}"]
    if figures.ttft_s is not None:
        stages = sorted(figures.stages.items(), key=lambda stage: -stage[1])[:4]
        parts = ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in stages)
        lines.append(f"TTFT {1e3 * figures.ttft_s:.1f} ms on average ({parts})")
    if figures.itl_p50_s is not None and figures.itl_p99_s is not None:
        lines.append(f"ITL up to {1e3 * figures.itl_p50_s:.3g} ms, 99% up to {1e3 * figures.itl_p99_s:.3g} ms")
    if figures.hits is not None:
        lines.append(f"{figures.hits:.0%} of prompt tokens were in a prefix cache")
    limits = ", ".join(f"{name} {share:.0%}" for name, share in figures.bottleneck.items() if share)
    lines.append(f"bottleneck by share of the time: {limits or 'not known'}")
    return Text("\n".join(lines))


def _pools(figures: Figures) -> Table:
    table = Table(box=None, padding=(0, 1))
    table.add_column("pool")
    for role in POOLS:
        table.add_column(role, justify="right")
    for name in _POOL_ROWS:
        table.add_row(name, *(_cell(figures.pool(role), name) for role in POOLS))
    return table


def _cell(pool: Pool, name: str) -> str:
    value = getattr(pool, name)
    if value is None:
        return "-"
    return f"{value:.1%}" if name in _SHARES else f"{value:.1f}".removesuffix(".0")
