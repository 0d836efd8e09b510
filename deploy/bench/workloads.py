"""Makes traces: with prefixes that many requests share, with sessions of several turns, and with nothing in common.

All arrivals are Poisson processes. Each trace follows from its seed.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from deploy.bench.trace import BLOCK_TOKENS, Entry

_ZIPF = 1.0
"""How much more often the first prefixes are used than the last: the n-th has weight 1 / n."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What is made. `per_s`: requests a second, and sessions' first turns are as many fewer. `input_len`,
    `output_len`: mean tokens of what a request adds, and of its answer; each is drawn from half to one and a half of
    it. `prefix_len`: tokens of a shared prefix; `num_prefixes`: how many there are. `num_turns`: of a session;
    `think_s`: mean time from one turn of it to the next."""

    num_requests: int
    per_s: float
    seed: int = 0
    input_len: int = 1024
    output_len: int = 128
    prefix_len: int = 4096
    num_prefixes: int = 64
    num_turns: int = 6
    think_s: float = 10.0


class _Ids:
    """Draws lengths, and names blocks that no other prompt has."""

    def __init__(self, shape: Shape) -> None:
        self.random = Random(shape.seed)
        self._fresh = itertools.count(1_000_000 * (shape.seed + 1))

    def length(self, mean: int) -> int:
        return max(1, self.random.randint(mean - mean // 2, mean + mean // 2))

    def blocks(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(next(self._fresh) for _ in range(-(-num_tokens // BLOCK_TOKENS)))


def uncorrelated(shape: Shape) -> list[Entry]:
    """No two prompts have anything in common."""
    ids, now, entries = _Ids(shape), 0.0, list[Entry]()
    for _ in range(shape.num_requests):
        now += ids.random.expovariate(shape.per_s)
        length = ids.length(shape.input_len)
        entries.append(Entry(now * 1e3, length, ids.length(shape.output_len), ids.blocks(length)))
    return entries


def shared_prefix(shape: Shape) -> list[Entry]:
    """Each prompt begins with one of a few long prefixes, such as system prompts or documents; some are much more
    popular than others."""
    ids, now, entries = _Ids(shape), 0.0, list[Entry]()
    prefix_blocks = max(1, shape.prefix_len // BLOCK_TOKENS)
    prefixes = [ids.blocks(prefix_blocks * BLOCK_TOKENS) for _ in range(shape.num_prefixes)]
    weights = [1 / (rank + 1) ** _ZIPF for rank in range(shape.num_prefixes)]
    for _ in range(shape.num_requests):
        now += ids.random.expovariate(shape.per_s)
        (prefix,) = ids.random.choices(prefixes, weights)
        own = ids.length(shape.input_len)
        blocks = prefix + ids.blocks(own)
        entries.append(Entry(now * 1e3, prefix_blocks * BLOCK_TOKENS + own, ids.length(shape.output_len), blocks))
    return entries


def multi_turn(shape: Shape) -> list[Entry]:
    """Sessions: each turn's prompt is that of the turn before it, with its answer and something new. Whole blocks are
    shared only."""
    ids, entries = _Ids(shape), list[Entry]()
    waiting = list[tuple[float, int, int, tuple[int, ...]]]()  # of the next turns: when, serial, its number, blocks
    serials, arrival = itertools.count(), 0.0
    while len(entries) < shape.num_requests:
        if not waiting or waiting[0][0] > arrival:
            heapq.heappush(waiting, (arrival, next(serials), 0, ()))
            arrival += ids.random.expovariate(shape.per_s / shape.num_turns)
        when, _, turn, held = heapq.heappop(waiting)
        own = ids.length(shape.input_len)
        length, output = len(held) * BLOCK_TOKENS + own, ids.length(shape.output_len)
        blocks = held + ids.blocks(own)
        entries.append(Entry(when * 1e3, length, output, blocks))
        if turn + 1 < shape.num_turns:
            kept = blocks[: length // BLOCK_TOKENS]
            think_s = ids.random.expovariate(1 / shape.think_s)
            heapq.heappush(waiting, (when + think_s, next(serials), turn + 1, kept))
    return sorted(entries, key=lambda entry: entry.timestamp)


WORKLOADS: dict[str, Callable[[Shape], list[Entry]]] = {
    "shared-prefix": shared_prefix,
    "multi-turn": multi_turn,
    "uncorrelated": uncorrelated,
}
