"""A node's KV memory at one moment: every block and every staging slot, who has it, and since when.

The audit is taken on the engine's thread between two turns, so it is consistent. `/debug/kv` and the `AuditKv` call
both show a `KvAudit`; ages are in seconds of the node's own clock. A router's epoch is a secret, because it could be
used to end the router's work: an audit shows its `epoch_name` instead.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

from baton.messages import AttemptId, NodeRole

OK = "ok"
_ENTRIES_PER_PIECE = 100


def epoch_name(epoch: int) -> int:
    """A short number that stands for a router's epoch in pages and log lines without revealing it."""
    return int.from_bytes(hashlib.sha256(b"epoch %d" % epoch).digest()[:4])


def without_epoch(attempt_id: AttemptId) -> AttemptId:
    """The id of the work as an audit shows it, with `epoch_name` for the epoch."""
    return replace(attempt_id, router_epoch=epoch_name(attempt_id.router_epoch))


class KvUse(enum.Enum):
    """What a holder uses its blocks for."""

    OWNS = "owns"  # counted by `ref`
    READS = "reads"  # a gather reads it
    WRITES = "writes"  # parts go into it whenever they arrive


@dataclass(frozen=True, slots=True)
class KvHolder:
    """Who has blocks: a "sequence" of the engine, or a "lease" of a decode node. `state` is that of the sequence or
    lease.

    The epoch in `attempt_id` is its `epoch_name`. `lease` is 0 and `peer`, the incarnation at the other end of the
    handoff, is empty while there is no handoff. `age_s` counts from the first block that it got.
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
    """A block that is not free. `hash` is in hex, empty if there is none; `holders` are indexes of `KvAudit.holders`,
    one for each reference or pin; `age_s` counts from when it came into its state."""

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
    """A staging slot and the part in it; `peer` is empty if the slot is free. `age_s` counts from when it was taken or
    given back."""

    slot: int
    state: str
    peer: str
    lease: int
    part: int
    age_s: float


@dataclass(frozen=True, slots=True)
class KvAudit:
    """`integrity` is "ok", or says what does not agree. `idle`: no request is here in any state.

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
        """The audit's JSON, in pieces that each take less than a millisecond to make: 50,000 blocks take 0.1 s, and
        other threads must run meanwhile."""
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
    """The same as `json.dumps`. Blocks are many, and written by hand they take a fifth of the time."""
    if not isinstance(entry, KvBlock):
        return json.dumps(entry, default=_plain)
    return (
        f'{{"block": {entry.block}, "state": "{entry.state}", "ref": {entry.ref}, "readers": {entry.readers}, '
        f'"writer": {entry.writer}, "hash": "{entry.hash}", "holders": {[*entry.holders]}, "age_s": {entry.age_s}}}'
    )


def _plain(value: object) -> object:
    """How JSON shows our own types: an enum's value, a dataclass's fields."""
    if isinstance(value, enum.Enum):
        return value.value
    return {name: getattr(value, name) for name in type(value).__dataclass_fields__}  # type: ignore[attr-defined]
