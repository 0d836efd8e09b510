"""The effects of hostile clients and peers on others: `python -m benchmarks.serving.hostile --save before.json`

Runs one case after another against a cluster on this machine and a victim's stream (see `hostile.victim`). Measures the
outcome for the attacker, the victim's longest gap, the processes' memory, and whether they are alive and pass their
integrity checks. A case that leaves a process dead, larger or unable to serve is followed by a fresh cluster.
`--against` also prints an earlier run, possibly of older code, in whose tree these files run unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import grpc
from pydantic import Field

from baton.address import HostPort
from baton.settings import Settings, parse
from benchmarks.harness.cluster import running_cluster
from benchmarks.harness.http_stream import Connection
from benchmarks.harness.tables import Table
from benchmarks.serving.hostile import clients, nodes, peers  # noqa: F401 - they register their cases
from benchmarks.serving.hostile.case import CASES, UP, Attack, Case
from benchmarks.serving.hostile.stranger import Stranger
from benchmarks.serving.hostile.victim import Seen, Victim
from benchmarks.serving.hostile.watch import Memory, Process, cluster_processes, few_descriptors, get, integrity

MIB = 2**20
CASE_S = 400.0
AFTER_S = 2.0
"""How long to wait after an attack for its effects to show."""
RECOVER_S = 30.0
FRESH_MIB = 48
"""A case that leaves a process larger by this much is followed by a fresh cluster."""
GOAL_GAP_MS = 250.0
PEACE_S = 8.0


class HostileSettings(Settings):
    """Attacks a cluster of its own in every way that it knows, beside a victim's stream."""

    prog: ClassVar[str] = "benchmarks.serving.hostile"

    only: str = Field("", description="names of cases, with commas between; unset: all")
    up: str = Field("", description="more flags of the cluster, as for baton-up")
    save: Path | None = Field(None, description="file for the figures; cases that it has already are kept")
    against: Path | None = Field(None, description="file of an earlier run, to be printed beside this one")


@dataclass(slots=True)
class Row:
    """One case's figures. Memory is growth: `peak` during the attack, `kept` afterwards. `dead`: processes that ended
    by themselves; `ended`: those that the case ended, and how."""

    text: str
    outcome: str
    seconds: float
    gap_ms: float
    tokens_per_s: float
    lost: int
    peak_mib: dict[str, int]
    kept_mib: dict[str, int]
    dead: list[str]
    ended: dict[str, str]
    integrity: str
    serves: str


@contextlib.asynccontextmanager
async def arena(flags: str) -> AsyncIterator[tuple[Attack, Victim]]:
    """A serving cluster, and a victim with a running stream."""
    few_descriptors()
    async with running_cluster(flags) as addresses:
        processes = cluster_processes()
        nodes = {name: HostPort.parse(p.flags["listen"]) for name, p in processes.items() if "listen" in p.flags}
        async with Stranger(nodes["decode-0"]) as one:
            info = one.info
        router = HostPort.parse(processes["router"].flags["grpc"])
        attack = Attack(addresses.http, router, nodes, processes, info.max_model_len, info.vocab_size)
        async with Victim(addresses.http) as victim:
            if not await victim.flows(RECOVER_S):
                raise RuntimeError("the victim's stream does not flow")
            yield attack, victim


async def measure(case: Case, attack: Attack, victim: Victim) -> Row:
    with Memory(attack.processes) as memory:
        attack.begin()
        outcome = await _run(case, attack)
        ended = time.monotonic()
        await asyncio.sleep(AFTER_S)
        flows = await victim.flows(RECOVER_S)
    until = time.monotonic()
    seen: Seen = victim.between(attack.began, until)
    now = cluster_processes()
    dead, ended_by_case = gone(attack, now)
    return Row(
        text=f"{case.text}, {attack.size}" if attack.size else case.text,
        outcome=outcome,
        seconds=round(ended - attack.began, 2),
        gap_ms=round(seen.longest_gap_s * 1e3, 1),
        tokens_per_s=round(victim.between(attack.began, ended).num_tokens / max(ended - attack.began, 1e-3), 1),
        lost=len(seen.lost),
        peak_mib={name: (memory.peak[name] - size) // MIB for name, size in memory.before.items()},
        kept_mib={name: (memory.after[name] - size) // MIB for name, size in memory.before.items()},
        dead=dead,
        ended=ended_by_case,
        integrity=await integrity(now),
        serves=await _serves(attack.http) if flows else "the victim's stream does not flow",
    )


def gone(attack: Attack, now: dict[str, Process]) -> tuple[list[str], dict[str, str]]:
    """`dead` and `ended` of a Row. `now`: the processes that there are."""
    names = [name for name, process in attack.processes.items() if name not in now or now[name].pid != process.pid]
    ended = {name: attack.ended[name] for name in names if name in attack.ended}
    return [name for name in names if name not in ended], ended


async def _run(case: Case, attack: Attack) -> str:
    try:
        async with asyncio.timeout(CASE_S):
            return await case.run(attack)
    except TimeoutError:
        return f"no end within {CASE_S:g} s"
    except grpc.RpcError as error:
        return f"a call failed: {str(error).splitlines()[0][:80]}"
    except (OSError, EOFError, ValueError, LookupError) as error:  # the case's own connection to a dying process
        return f"cut off: {error!r}"[:100]


async def _serves(http: HostPort) -> str:
    """`yes`, or the reason why not."""
    status, text = await get(http, "/ready")
    answer = await clients.exchange(http, clients.post("/v1/completions", nodes.BODY), 10.0)
    return "yes" if status == 200 and answer == "200" else f"/ready {status} {text[:80]}, a request {answer}"


async def peace(attack: Attack) -> str:
    attack.begin()
    await asyncio.sleep(PEACE_S)
    return "-"


PEACE = Case("peace", "nobody attacks", peace, UP)


async def run(settings: HostileSettings) -> dict[str, Row]:
    """Run all selected cases. A cluster is reused as long as cases leave it intact."""
    only = [name for name in settings.only.split(",") if name]
    waiting = [case for case in (PEACE, *CASES) if not only or case.name in only]
    if unknown := set(only) - {case.name for case in (PEACE, *CASES)}:
        sys.exit(f"{settings.prog}: --only: unknown: {', '.join(sorted(unknown))}")
    waiting.sort(key=lambda case: case.flags != UP)
    rows: dict[str, Row] = {}
    while waiting:
        flags = waiting[0].flags
        async with arena(f"{flags} {settings.up}") as (attack, victim):
            await _check(attack)
            whole = True
            while whole and waiting and waiting[0].flags == flags:
                case = waiting.pop(0)
                row = rows[case.name] = await measure(case, attack, victim)
                print(f"{case.name}: {row.outcome} {json.dumps(asdict(row))}", file=sys.stderr, flush=True)
                _save(settings.save, rows)
                whole = (
                    not row.dead and not row.ended and row.serves == "yes" and max(row.kept_mib.values()) < FRESH_MIB
                )
    return rows


async def _check(attack: Attack) -> None:
    """Check the answers of a cluster that is not under attack, before anything is measured."""
    async with Connection(attack.http) as connection:
        answers = [await connection.stream("/v1/completions", _QUESTION) for _ in range(2)]
    if answers[0].tokens != answers[1].tokens or len(answers[0].tokens) != _QUESTION["max_tokens"]:
        sys.exit("benchmarks.serving.hostile: a cluster at peace gives wrong answers")


_QUESTION: dict[str, Any] = {"prompt": "What is measured", "max_tokens": 16, "temperature": 0, "ignore_eos": True}


def _save(path: Path | None, rows: dict[str, Row]) -> None:
    if path:
        path.write_text(json.dumps(_load(path) | {name: asdict(row) for name, row in rows.items()}, indent=1))


def _load(path: Path | None) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path and path.exists() else {}


def table(rows: dict[str, Any], before: dict[str, Any]) -> Table:
    """`before`: the same cases of an earlier run, each shown above that of this run."""
    columns = ["case", "run", "ends with", "s", "gap ms", "tokens/s", "lost", "memory MiB", "kept MiB", "state"]
    lines = []
    for name, row in rows.items():
        for run_name, one in (("before", before.get(name)), ("now", row)):
            if one:
                lines.append([one["text"] if run_name == "now" or name not in rows else name, run_name, *_cells(one)])
    return Table(columns, lines)


def _cells(row: dict[str, Any]) -> list[str]:
    ended = row.get("ended", {})  # which files of older code lack
    state = [f"{name} died" for name in row["dead"]] + [f"{name} {how}" for name, how in ended.items()]
    state += [] if row["integrity"] == "ok" else [row["integrity"]]
    state += [] if row["serves"] == "yes" else [row["serves"]]
    numbers = (f"{row['seconds']:.2f}", f"{row['gap_ms']:.0f}", f"{row['tokens_per_s']:.0f}", str(row["lost"]))
    return [row["outcome"], *numbers, _sizes(row["peak_mib"]), _sizes(row["kept_mib"]), "; ".join(state) or "ok"]


def _sizes(sizes: dict[str, int]) -> str:
    """Sizes of router, prefill and decode nodes, in this order."""
    return "/".join(str(size) for size in sizes.values())


def main(argv: Sequence[str] | None = None) -> None:
    settings = parse(HostileSettings, argv)
    rows = {name: asdict(row) for name, row in asyncio.run(run(settings)).items()}
    print(table(rows, _load(settings.against)).markdown())
    gaps = {name: row["gap_ms"] for name, row in rows.items() if row["gap_ms"] > GOAL_GAP_MS}
    summary = {
        "num_cases": len(rows),
        "gaps_above_goal_ms": gaps,
        "goal_ms": GOAL_GAP_MS,
        "num_lost_streams": sum(row["lost"] for row in rows.values()),
        "dead": sorted({name for row in rows.values() for name in row["dead"]}),
        "not_whole": [name for name, row in rows.items() if row["integrity"] != "ok" or row["serves"] != "yes"],
    }
    print(json.dumps({"benchmark": "hostile", **summary, "cases": rows}))
