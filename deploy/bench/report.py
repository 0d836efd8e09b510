"""The report as text and as JSON."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import baton
from baton.process.resources import num_cpus
from deploy.bench.figures import LATENCIES
from deploy.bench.stats import table


def report(runs: Mapping[str, Mapping[str, Any]], goodput: Mapping[str, Any] | None, details: Mapping[str, str]) -> str:
    """A table for each run, the failures by kind with an example of each, and the goodput."""
    parts = [_run(name, run) for name, run in runs.items()]
    parts += [f"failure, for example: {detail}" for detail in details.values()]
    if goodput:
        found = ", ".join(_rate(rate, goodput) for rate in goodput["per_seed"])
        offered = ", ".join(f"{rate:.3f}" for rate in goodput["offered_per_s"])
        parts.append(
            f"goodput: {_rate(goodput['requests_per_s'], goodput)} requests/s (median of {found}; offered: {offered})"
        )
    return "\n\n".join(parts)


def _rate(rate: float, goodput: Mapping[str, Any]) -> str:
    """Beyond the rates that were tried nothing is known."""
    if rate >= goodput["max_rate"]:
        return f"{rate:.3f} or more"
    return f"{rate:.3f}" if rate else f"less than {goodput['min_rate']:.3f}"


def _run(name: str, run: Mapping[str, Any]) -> str:
    errors = ", ".join(f"{count} {kind}" for kind, count in run["errors"].items())
    lines = [
        f"{name}: {run['completed']} answered, {run['failed']} failed{f' ({errors})' if errors else ''}, "
        f"{run['duration_s']:.2f} s",
        f"{run['requests_per_s']:.2f} requests/s of {run['offered_per_s']:.2f} offered, "
        f"{run['output_tokens_per_s']:.1f} output tokens/s, "
        f"{run['total_tokens_per_s']:.1f} tokens/s; sent at most {run['sent_late_ms']:.1f} ms late",
    ]
    if run["cached_tokens"] is not None and run["input_tokens"]:
        share = run["cached_tokens"] / run["input_tokens"]
        lines.append(f"{share:.0%} of the prompt tokens were in the server's prefix cache")
    if run["without_usage"]:
        lines.append(f"{run['without_usage']} answers came without usage: their events count as tokens")
    if run["completed"]:
        lines.append(table({label: run[key] for key, label in LATENCIES.items()}, "ms"))
    return "\n".join(lines)


def environment() -> dict[str, Any]:
    """Where the client ran."""
    return {
        "baton": baton.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "num_cores": num_cpus(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def as_json(value: Any) -> str:
    """NaN, which JSON lacks, becomes null, and infinity the text that a flag takes: --request-rate=inf is not unset."""
    return json.dumps(_finite(value), indent=2, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value
