"""What the clients of a simulation saw, and how evenly the nodes worked."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from benchmarks.simulation.fleet import Answer
from deploy.bench.stats import percentile


@dataclass(frozen=True, slots=True)
class Limits:
    """What an answer must keep to count as good: seconds to its first token, and between any two."""

    ttft_s: float
    gap_s: float


@dataclass(frozen=True, slots=True)
class Report:
    """Times in milliseconds. hit_rate: share of all prompts' tokens that the computing node had cached. good_share,
    goodput: answers within the limits, of all and per second. prefill_balance, decode_balance: the busiest node's
    tokens, as a multiple of the mean."""

    num_requests: int
    num_refused: int
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    longest_gap_p50: float
    hit_rate: float
    good_share: float
    goodput: float
    prefill_balance: float
    decode_balance: float


def report(answers: Sequence[Answer], num_prefill: int, num_decode: int, limits: Limits) -> Report:
    """Refused requests have no times, and are not good."""
    served = [answer for answer in answers if answer.token_times and not answer.refused]
    ttft = [answer.token_times[0] - answer.arrived for answer in served]
    gaps = [_gaps(answer) for answer in served]
    longest = [max(own, default=0.0) for own in gaps]
    good = sum(a <= limits.ttft_s and b <= limits.gap_s for a, b in zip(ttft, longest, strict=True))
    prefilled, generated = Counter[str](), Counter[str]()
    for answer in served:
        assert answer.timings is not None
        prefilled[answer.timings.prefill_node] += answer.entry.input_length - answer.timings.num_cached_tokens
        generated[answer.timings.decode_node] += len(answer.token_times)
    num_tokens = sum(answer.entry.input_length for answer in served)
    span_s = max((answer.token_times[-1] for answer in served), default=0.0) - min(a.arrived for a in answers)
    between = list(itertools.chain.from_iterable(gaps))
    return Report(
        num_requests=len(answers),
        num_refused=len(answers) - len(served),
        ttft_p50=1e3 * percentile(ttft, 50),
        ttft_p90=1e3 * percentile(ttft, 90),
        ttft_p99=1e3 * percentile(ttft, 99),
        itl_p50=1e3 * percentile(between, 50),
        itl_p99=1e3 * percentile(between, 99),
        longest_gap_p50=1e3 * percentile(longest, 50),
        hit_rate=sum(a.timings.num_cached_tokens for a in served if a.timings) / num_tokens if num_tokens else 0.0,
        good_share=good / len(answers),
        goodput=good / span_s if span_s > 0 else 0.0,
        prefill_balance=_balance(prefilled.values(), num_prefill),
        decode_balance=_balance(generated.values(), num_decode),
    )


def median(reports: Sequence[Report]) -> Report:
    """Of each number its median."""
    values = {field.name: [getattr(one, field.name) for one in reports] for field in fields(Report)}
    return Report(**{name: statistics.median(own) for name, own in values.items()})


def _gaps(answer: Answer) -> list[float]:
    return [b - a for a, b in itertools.pairwise(answer.token_times)]


def _balance(loads: Iterable[int], num_nodes: int) -> float:
    counts = list(loads)
    return max(counts) * num_nodes / sum(counts) if sum(counts) and num_nodes else 1.0


_COLUMNS = ("TTFT p50", "p90", "p99", "ITL p50", "p99", "longest gap", "hit rate", "good", "goodput/s", "balance P, D")


def markdown(rows: dict[str, Report]) -> str:
    """A table with a row for each policy, and how many requests have no times in it."""
    lines = [f"| policy | {' | '.join(_COLUMNS)} |", f"| --- |{' ---: |' * len(_COLUMNS)}"]
    for name, row in rows.items():
        times = (row.ttft_p50, row.ttft_p90, row.ttft_p99, row.itl_p50, row.itl_p99, row.longest_gap_p50)
        cells = [f"{value:.0f}" if value >= 100 else f"{value:.1f}" for value in times]
        cells += [f"{row.hit_rate:.0%}", f"{row.good_share:.1%}", f"{row.goodput:.1f}"]
        cells.append(f"{row.prefill_balance:.2f}, {row.decode_balance:.2f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    some = {name: row for name, row in rows.items() if row.num_refused}
    refused = [f"{name}: {row.num_refused} of {row.num_requests} refused" for name, row in some.items()]
    lines += ["", *refused] if refused else []
    return "\n".join(lines)
