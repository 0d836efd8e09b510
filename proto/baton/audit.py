"""A snapshot of a node's KV memory: every block and every staging slot, its holders and their age.

The audit is taken on the engine's thread between two turns, so it is consistent. `/debug/kv` and the `AuditKv` call
both return a `KvAudit`; ages are in seconds of the node's own clock. A router's epoch is a secret, because it could be
used to abort the router's work: an audit shows its `epoch_name` instead.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields

from baton.messages import AttemptId
from baton.node_info import NodeRole

OK = "ok"
_ENTRIES_PER_PIECE = 100


def epoch_name(epoch: int) -> int:
    """A short number that identifies a router's epoch in pages and log lines without revealing it."""
    return int.from_bytes(hashlib.sha256(b"epoch %d" % epoch).digest()[:4])


def without_epoch(attempt_id: AttemptId) -> AttemptId:
    """The attempt's id as an audit shows it, with `epoch_name` in place of the epoch."""
    return attempt_id._replace(router_epoch=epoch_name(attempt_id.router_epoch))


class KvUse(enum.Enum):
    """What a holder uses its blocks for."""

    OWNS = "owns"  # counted by `ref`
    READS = "reads"  # a gather reads it
    WRITES = "writes"  # arriving parts are scattered into it


@dataclass(frozen=True, slots=True)
class KvHolder:
    """A holder of blocks: a "sequence" of the engine or a "lease" of a decode node, and its `state`.

    The epoch in `attempt_id` is its `epoch_name`. `peer` is the incarnation at the other end of the handoff; without a
    handoff it is empty and `lease` is 0. `age_s` counts from when the holder got its first block.
    """

    kind: str
    state: str
    use: KvUse
    attempt_id: AttemptId
    samples: tuple[int, ...]
    lease: int
    peer: str
    age_s: float


@dataclass(frozen=True, slots=True)
class KvBlock:
    """A block that is not free. `hash` is in hex, or empty; `holders` are indexes into `KvAudit.holders`, one for each
    reference or pin; `age_s` counts from when the block entered its state."""

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
    """A staging slot and the part in it; `peer` is empty if the slot is free. `age_s` counts from when it was acquired
    or released."""

    slot: int
    state: str
    peer: str
    lease: int
    part: int
    age_s: float


@dataclass(frozen=True, slots=True)
class KvAudit:
    """`integrity` is "ok" or describes the inconsistency. `idle`: the node has no request in any state.

    No count includes the null block. Free blocks are counted but not listed.
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
        """The audit's JSON, in pieces that each take less than a millisecond to build: 50,000 blocks take 0.1 s, during
        which other threads must be able to run."""
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
    """Equivalent to `json.dumps`. There are many blocks, and formatting them by hand takes a fifth of the time."""
    if not isinstance(entry, KvBlock):
        return json.dumps(entry, default=_plain)
    return (
        f'{{"block": {entry.block}, "state": "{entry.state}", "ref": {entry.ref}, "readers": {entry.readers}, '
        f'"writer": {entry.writer}, "hash": "{entry.hash}", "holders": {[*entry.holders]}, "age_s": {entry.age_s}}}'
    )


def _plain(value: object) -> object:
    """The JSON form of our own types: an enum's value, a dataclass's fields."""
    if isinstance(value, enum.Enum):
        return value.value
    fields_of: Iterable[str] = type(value).__dataclass_fields__  # type: ignore[attr-defined]
    return {name: _named(getattr(value, name)) for name in fields_of}


def _named(value: object) -> object:
    """An attempt's id is a tuple, and JSON's form of it an object all the same."""
    return value._asdict() if isinstance(value, AttemptId) else value
