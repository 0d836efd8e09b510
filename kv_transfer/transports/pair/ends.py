"""The two ends of a one-way connection: the pusher dialled it, the receiver accepted it.

State only: `Links` handles frames, `Messages` reports the ends of operations.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field

from kv_transfer.async_operation import DONE, AsyncOperation, RemoteSlot
from kv_transfer.transports.pair.address import PairAddress
from kv_transfer.transports.pair.carrier import Receiving, Sending
from kv_transfer.transports.pair.channel import Channel

DEATH_S = 1.0
"""How long a process may go on writing after its connection broke: a copy on its GPU briefly outlives it."""


@dataclass(eq=False, slots=True)
class Push:
    """Waits for the grant of its tag; then `native` is under way. For a placed grant that is `storing`; `signals`: its
    last store sets the peer's completion flag."""

    tag: int
    slot: int
    num_bytes: int
    header: bytes
    storing: AsyncOperation = DONE
    native: AsyncOperation | None = None
    placed: bool = False
    signals: bool = False


@dataclass(eq=False, slots=True)
class Expect:
    """`granted`: the peer may write into the slot at any time. `begun`: it has sent the header and is writing."""

    tag: int
    slot: int
    num_bytes: int
    granted: bool = False
    begun: bool = False
    header: bytes = b""
    native: AsyncOperation | None = None


@dataclass(eq=False, slots=True)
class Grant:
    """`target`: the peer's slot, if kernels of this process can reach it. Once `placed`, the mover stores into it, and
    the peer may have been notified (`announced`). The stores, and so when they are over, are known once the part is
    pushed (`storing`)."""

    num_bytes: int
    place: bytes
    target: RemoteSlot | None
    channel: Channel
    placed: bool = False
    announced: bool = False
    storing: AsyncOperation | None = None
    error: str = ""

    def query(self) -> bool:
        return self.storing is not None and self.storing.query()


@dataclass(eq=False, slots=True)
class Outbound:
    """The pushing end. `leaving`: what was under way when it was cut."""

    channel: Channel
    sending: Sending
    grants: dict[int, Grant] = field(default_factory=dict)
    leaving: list[AsyncOperation] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return all(native.query() for native in self.leaving)


@dataclass(eq=False, slots=True)
class Inbound:
    """The receiving end. The peer's end of stream means that it writes no more; without a BYE before, it died.
    `has_granted`: a slot was granted on it."""

    channel: Channel
    receiving: Receiving
    remote: str
    has_granted: bool = False
    said_bye: bool = False
    broke_at: float = 0.0
    over: bool = False
    leaving: list[AsyncOperation] = field(default_factory=list)

    def end(self) -> None:
        """Nothing more can be received from the peer."""
        self.broke_at = time.monotonic()
        self.over = self.said_bye

    @property
    def is_over(self) -> bool:
        """Whether nothing writes into the slots granted here any more. If there were none, nobody waits for the peer,
        who may keep its end open for ever."""
        if not self.has_granted:
            return True
        if not self.over and self.broke_at:
            self.over = time.monotonic() - self.broke_at > DEATH_S
        return self.over and all(native.query() for native in self.leaving)


@dataclass(eq=False, slots=True)
class Link:
    """A peer's connections in both directions, of which either may be established first."""

    peer: str
    address: bytes
    theirs: PairAddress  # the address, unpacked
    waiting: list[Future[None]] = field(default_factory=list)
    out: Outbound | None = None
    inward: Inbound | None = None
    pushes: dict[int, Push] = field(default_factory=dict)
    expects: dict[int, Expect] = field(default_factory=dict)

    @property
    def remote(self) -> str:
        return self.theirs.id

    @property
    def under_way(self) -> list[tuple[Push | Expect, AsyncOperation]]:
        """Operations that this end has started."""
        operations: list[Push | Expect] = [*self.pushes.values(), *self.expects.values()]
        return [(operation, operation.native) for operation in operations if operation.native is not None]

    @property
    def coming(self) -> list[Expect]:
        """Receives that only the other end carries out, which may be complete."""
        return [expect for expect in self.expects.values() if expect.begun and expect.native is None]

    @property
    def is_urgent(self) -> bool:
        """Whether a part moves without an operation of this end's carrier, which takes no longer than a kernel, and a
        request waits for this end to notice its completion."""
        return bool(self.coming) or any(push.placed and not push.signals for push in self.pushes.values())

    @property
    def is_busy(self) -> bool:
        return bool(self.under_way) or any(expect.begun for expect in self.expects.values())
