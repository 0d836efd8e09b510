"""A node's KV memory at one moment: every block and every staging slot, who has it, and since when.

Taken on the engine's thread between two turns, so that all of it belongs together. `/debug/kv` and the `AuditKv` call
both show a `KvAudit`; ages are seconds, counted by the node's own clock. A router's epoch is a secret, with which its
work could be ended: an account names it by `epoch_name`.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

from baton.messages import NodeRole, WorkId

OK = "ok"
_ENTRIES_PER_PIECE = 100


def epoch_name(epoch: int) -> int:
    """A short number that stands for a router's epoch in pages and log lines, and does not tell it."""
    return int.from_bytes(hashlib.sha256(b"epoch %d" % epoch).digest()[:4])


def without_epoch(work: WorkId) -> WorkId:
    """The work as an account names it."""
    return replace(work, router_epoch=epoch_name(work.router_epoch))


class KvUse(enum.Enum):
    """What somebody has blocks for."""

    OWNS = "owns"  # counted by `ref`
    READS = "reads"  # a gather is at work
    WRITES = "writes"  # parts go into it, whenever they arrive


@dataclass(frozen=True, slots=True)
class KvHolder:
    """Who has blocks: a "sequence" of the engine, or a "lease" of a decode node. `state` is its own.

    The epoch in `work` is its `epoch_name`. `lease` and `peer`, the incarnation at the handoff's other end, are 0 and
    empty where there is no handoff (yet). `age_s` is since it was given blocks for the first time.
    """

    kind: str
    state: str
    use: KvUse
    work: WorkId
    samples: tuple[int, ...]
    lease: int
    peer: str
    age_s: float


@dataclass(frozen=True, slots=True)
class KvBlock:
    """A block that is not free. `hash` is hex, empty while it has none; `holders` are indexes of `KvAudit.holders`, one
    for each time that it is had; `age_s` is since it came into its state."""

    block: int
    state: str
    ref: int
    readers: int
    writer: int
    hash: str
    holders: tuple[int, ...]
    age_s: float


@dataclass(frozen=True, slots=True)
class KvSlot:
    """A staging slot, and the part that has it; `peer` is empty when it is free. `age_s` is since it was taken, or
    given back."""

    slot: int
    state: str
    peer: str
    lease: int
    part: int
    age_s: float


@dataclass(frozen=True, slots=True)
class KvAudit:
    """`integrity` is "ok", or in which way the books do not agree. `idle`: no request is here in any state.

    The null block is in no count. Blocks that are free are counted and not listed.
    """

    node_id: str
    incarnation: str
    role: NodeRole
    integrity: str
    idle: bool
    num_blocks: Mapping[str, int]  # by state
    num_slots: Mapping[str, int]  # by state
    holders: tuple[KvHolder, ...]
    blocks: tuple[KvBlock, ...]
    slots: tuple[KvSlot, ...]

    def json_pieces(self) -> Iterator[str]:
        """Its JSON in pieces that each take less than a millisecond to make: 50,000 blocks take 0.1 s, and other
        threads want to run meanwhile."""
        start = "{"
        for field in fields(self):
            value = getattr(self, field.name)
            yield f"{start}{json.dumps(field.name)}: "
            if isinstance(value, tuple):
                yield from _list_pieces(value)
            else:
                yield json.dumps(value, default=_plain)
            start = ", "
        yield "}"


def _list_pieces(entries: tuple[object, ...]) -> Iterator[str]:
    start = "["
    for first in range(0, len(entries), _ENTRIES_PER_PIECE):
        piece = entries[first : first + _ENTRIES_PER_PIECE]
        yield start + ", ".join(map(_entry, piece))
        start = ", "
    yield "]" if entries else "[]"


def _entry(entry: object) -> str:
    """As `json.dumps` has it. Blocks are many, and written out they take a fifth of the time."""
    if not isinstance(entry, KvBlock):
        return json.dumps(entry, default=_plain)
    return (
        f'{{"block": {entry.block}, "state": "{entry.state}", "ref": {entry.ref}, "readers": {entry.readers}, '
        f'"writer": {entry.writer}, "hash": "{entry.hash}", "holders": {[*entry.holders]}, "age_s": {entry.age_s}}}'
    )


def _plain(value: object) -> object:
    """What JSON shows of our own types: an enum's value, a dataclass's fields."""
    if isinstance(value, enum.Enum):
        return value.value
    return {name: getattr(value, name) for name in type(value).__dataclass_fields__}  # type: ignore[attr-defined]
