"""What state machines hold: every container within them, and those that keep something when all work is over."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass

from engine.sequence import Sequence as EngineSequence

OURS = ("baton", "decode_node", "engine", "kv_transfer", "node", "prefill_node", "router")
LASTING = re.compile(
    r"\._fences\.|\._outcomes\.|\._outbox\.epochs$"  # until no message can be under way
    r"|\._peers$|planners$|planners\[.*\._rounds|\._connected|\.waiting\._lanes$|\.kv_flows\.|\.pool\.|\.prefix_index\."
    r"|\._not_before$|\.num_placements$|\.num_by_outcome$|\._timing\.|\.counters\.|\.layouts?\b|\.rows$|\._nodes$"
    r"|\.blocks\._(ref|readers|since_s|free|cache)|\.transport\.|\._copies\."
)
"""Paths of what is about nodes, or was learned: not about a request that is over."""


def leftovers(value: object, path: str) -> dict[str, int]:
    """What is still held of requests, by path, although all are over."""
    return {place: size for place, size in walk(value, path) if size and not LASTING.search(place)}


def walk(value: object, path: str, seen: set[int] | None = None) -> Iterator[tuple[str, int]]:
    """(path, number of elements) of each container within our own objects; elements are not looked into."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping | Set | deque | list):
        yield path, len(value)
        for index, item in enumerate(value.values() if isinstance(value, Mapping) else ()):
            if index < 100:
                yield from walk(item, f"{path}[{index}]", seen)
    elif isinstance(value, tuple):  # not to be added to
        for index, item in enumerate(value):
            yield from walk(item, f"{path}[{index}]", seen)
    elif type(value).__module__.split(".")[0] in OURS and not isinstance(value, EngineSequence):
        for name in names_of(value):
            yield from walk(getattr(value, name, None), f"{path}.{name}", seen)


def names_of(value: object) -> Sequence[str]:
    if is_dataclass(value):
        return [field.name for field in fields(value)]
    return list(vars(value)) if hasattr(value, "__dict__") else []
