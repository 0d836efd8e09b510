"""The two ends of a connection that carries one direction: who pushes dialled it, who receives accepted it.

State only: the thread (`pair_thread.py`) hears frames and reports events.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field

from kv_transfer.carrier import Native, Receiving, Sending
from kv_transfer.channel import Channel

DEATH_S = 1.0
"""How long after its connection broke a process may go on writing: a copy on its GPU outlives it a little."""


@dataclass(eq=False, slots=True)
class Push:
    """Waits for the grant of its tag; then `native` is under way."""

    tag: int
    slot: int
    num_bytes: int
    native: Native | None = None


@dataclass(eq=False, slots=True)
class Expect:
    """`granted`: the peer may write into the slot at any time. `begun`: it does."""

    tag: int
    slot: int
    num_bytes: int
    granted: bool = False
    begun: bool = False
    native: Native | None = None


@dataclass(eq=False, slots=True)
class Grant:
    num_bytes: int
    place: bytes


@dataclass(eq=False, slots=True)
class Outbound:
    """The pushing end. `leaving`: what was under way when it was cut."""

    channel: Channel
    sending: Sending
    grants: dict[int, Grant] = field(default_factory=dict)
    leaving: list[Native] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return all(native.query() for native in self.leaving)


@dataclass(eq=False, slots=True)
class Inbound:
    """The receiving end. The peer's end of stream says that it writes no more; without a BYE before, it died."""

    channel: Channel
    receiving: Receiving
    remote: str
    said_bye: bool = False
    broke_at: float = 0.0
    over: bool = False
    leaving: list[Native] = field(default_factory=list)

    def end(self) -> None:
        """Nothing more is heard of the peer."""
        self.broke_at = time.monotonic()
        self.over = self.said_bye

    @property
    def is_over(self) -> bool:
        """Whether nobody writes into what was granted here."""
        if not self.over and self.broke_at:
            self.over = time.monotonic() - self.broke_at > DEATH_S
        return self.over and all(native.query() for native in self.leaving)


@dataclass(eq=False, slots=True)
class Link:
    """A peer: both directions, of which either may come first."""

    peer: str
    address: bytes
    remote: str
    waiting: list[Future[None]] = field(default_factory=list)
    out: Outbound | None = None
    inward: Inbound | None = None
    pushes: dict[int, Push] = field(default_factory=dict)
    expects: dict[int, Expect] = field(default_factory=dict)

    @property
    def under_way(self) -> list[tuple[Push | Expect, Native]]:
        """What the carrier has."""
        operations: list[Push | Expect] = [*self.pushes.values(), *self.expects.values()]
        return [(operation, operation.native) for operation in operations if operation.native is not None]

    @property
    def is_busy(self) -> bool:
        return bool(self.under_way) or any(expect.begun for expect in self.expects.values())
