"""Which expert is in which slot of a layer, so that ranks with whole experts are equally busy. Plain numbers.

A layer has equally many **slots** on each rank, and each slot holds one expert: rank r has slots [r * n, (r + 1) * n).
With more slots than experts, some experts have several **replicas**, which share the tokens that chose the expert.
After DeepSeek's EPLB (https://github.com/deepseek-ai/EPLB): first replicate the experts with the highest load per
replica, then pack the replicas onto ranks, the heaviest first, each on the rank with the least load. EPLB's groups of
experts, for ranks on several hosts, are left out.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Placement = npt.NDArray[np.int32]
"""[num_slots]: the expert in each slot."""
Load = npt.NDArray[np.int64]
"""[num_experts]: how many tokens chose each expert."""

MIN_GAIN = 0.05
"""Experts move only if the busiest rank's load falls by at least this share."""


def first_expert(num_experts: int, num_slots: int, num_ranks: int, rank: int) -> int:
    """The first expert that the rank reads from the checkpoint. It reads consecutive experts, one for each of its
    slots; with redundant slots, the ranges of neighbouring ranks overlap. Requires num_experts <= num_slots <=
    num_experts * num_ranks."""
    return rank * (num_experts - num_slots // num_ranks) // max(1, num_ranks - 1)


def first_placement(num_experts: int, num_slots: int, num_ranks: int) -> Placement:
    """The placement right after the ranks have read their weights."""
    firsts = [first_expert(num_experts, num_slots, num_ranks, rank) for rank in range(num_ranks)]
    return np.concatenate([np.arange(first, first + num_slots // num_ranks, dtype=np.int32) for first in firsts])


def rank_loads(placement: Placement, load: Load, num_ranks: int) -> npt.NDArray[np.float64]:
    """[num_ranks]: the tokens that each rank computes if replicas share their expert's tokens equally."""
    shared = load / np.bincount(placement, minlength=len(load))
    loads: npt.NDArray[np.float64] = shared[placement].reshape(num_ranks, -1).sum(axis=1)
    return loads


def balanced(load: Load, num_slots: int, num_ranks: int) -> Placement:
    """The best placement known for that load. If the experts can be divided evenly in order, the busiest rank never has
    more to do than with that placement. Deterministic."""
    counts = num_replicas(load, num_slots, num_ranks)
    found = [_packed(load, counts, num_ranks, spread=spread) for spread in (True, False)]
    found += _even(len(load), num_slots, num_ranks)
    return min(found, key=lambda placement: _busiest(placement, load, num_ranks))


def rebalanced(current: Placement, load: Load, num_ranks: int) -> Placement:
    """The placement to use instead of `current`. It is `current` itself unless the busiest rank's load falls by
    MIN_GAIN; otherwise, as many slots as possible keep their expert."""
    better = balanced(load, len(current), num_ranks)
    if _busiest(better, load, num_ranks) > (1 - MIN_GAIN) * _busiest(current, load, num_ranks) or not load.any():
        return current
    return _with_few_moves(better, current, num_ranks)


def num_replicas(load: Load, num_slots: int, num_ranks: int) -> npt.NDArray[np.int64]:
    """[num_experts]: how many replicas each expert has. Each starts with one; the rest go, one at a time, to the expert
    with the highest load per replica. No expert has more replicas than there are ranks."""
    counts = np.ones(len(load), np.int64)
    for _ in range(num_slots - len(load)):
        counts[np.where(counts < num_ranks, load / counts, -1.0).argmax()] += 1
    return counts


def _packed(load: Load, counts: npt.NDArray[np.int64], num_ranks: int, *, spread: bool) -> Placement:
    """Pack the replicas onto ranks: the heaviest first, each on the rank with the least load among those with a free
    slot. spread: prefer a rank that does not have the expert yet, so that more ranks share its load; two replicas may
    still end on one rank if only that one has room."""
    size = int(counts.sum()) // num_ranks
    held: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    for expert in sorted(range(len(load)), key=lambda expert: (-load[expert] / counts[expert], expert)):
        for _ in range(counts[expert]):
            free = [rank for rank in range(num_ranks) if len(held[rank]) < size]
            rank = min(free, key=lambda rank: (spread and expert in held[rank], loads[rank], rank))
            held[rank].append(expert)
            loads[rank] += load[expert] / counts[expert]
    return np.array(held, np.int32).reshape(-1)


def _even(num_experts: int, num_slots: int, num_ranks: int) -> list[Placement]:
    """Equally many experts on each rank, in order. Redundant slots repeat the rank's own experts, which changes no
    rank's load. Empty if the experts cannot be divided evenly."""
    if num_experts % num_ranks:
        return []
    rows = np.arange(num_experts, dtype=np.int32).reshape(num_ranks, -1)
    return [np.concatenate([np.resize(row, num_slots // num_ranks) for row in rows])]


def _busiest(placement: Placement, load: Load, num_ranks: int) -> float:
    return float(rank_loads(placement, load, num_ranks).max())


def _with_few_moves(new: Placement, current: Placement, num_ranks: int) -> Placement:
    """`new` with ranks and slots renumbered so that few experts move: each rank gets the part of which it already holds
    the most. Renumbering does not change the balance."""
    parts = new.reshape(num_ranks, -1).tolist()
    own = current.reshape(num_ranks, -1).tolist()
    common = [
        (-(Counter(part) & Counter(has)).total(), rank, index)
        for rank, has in enumerate(own)
        for index, part in enumerate(parts)
    ]
    chosen: dict[int, int] = {}
    for _, rank, index in sorted(common):
        if rank not in chosen and index not in chosen.values():
            chosen[rank] = index
    rows = [_in_place(parts[chosen[rank]], has) for rank, has in enumerate(own)]
    return np.array(rows, np.int32).reshape(-1)


def _in_place(part: list[int], has: list[int]) -> list[int]:
    """The experts of `part`, ordered so that an expert which the rank already holds stays in its slot."""
    left = Counter(part)
    kept: list[int | None] = []
    for expert in has:
        stays = left[expert] > 0
        left[expert] -= stays
        kept.append(expert if stays else None)
    others = iter(sorted(left.elements()))
    return [next(others) if expert is None else expert for expert in kept]


class Move(NamedTuple):
    """Slot `target` gets the expert that slot `source` had before all moves."""

    source: int
    target: int


def moves(current: Placement, new: Placement, num_ranks: int) -> list[Move]:
    """The moves that turn `current` into `new`, ordered by target. The source is a slot of the same rank if one has the
    expert; else the slots that have it take turns."""
    size = len(current) // num_ranks
    found = []
    for target in np.flatnonzero(current != new).tolist():
        sources = np.flatnonzero(current == new[target])
        own = sources[sources // size == target // size]
        found.append(Move(int(own[0] if len(own) else sources[target % len(sources)]), target))
    return found
