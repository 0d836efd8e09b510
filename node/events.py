"""What passes between a node's network thread and its engine thread.

    asyncio thread  --Event-->  inbox   --> Role.handle(event, now)   engine thread
    asyncio thread  <--Output-- outbox  <-- Role.take_outputs()       engine thread

A role is a state machine: events and the time go in, outputs come out. It has no sockets and no clock, so tests drive
it through every order of events.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from baton.audit import KvAudit
from baton.layout import KvLayout
from baton.messages import Abort, DecodeTarget, DecodeToPrefill, Load, Prefill, PrefillToDecode, Update

# ---- in ----


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """A router subscribed. Work of epochs without a session is refused."""

    epoch: int


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The router's stream ended: all its work on this node ends."""

    epoch: int


@dataclass(frozen=True, slots=True)
class FromRouter:
    epoch: int
    message: Prefill | Abort


@dataclass(frozen=True, slots=True)
class PeerOpened:
    """The handoff stream to or from another node is up: Hello exchanged, layouts compatible, transports connected.

    `part_blocks`: blocks that a part has at most, between these two nodes. `layout`: the peer's, which may divide the
    model among other ranks. `name`: of the peer, for people.
    """

    peer: str
    part_blocks: int
    layout: KvLayout
    name: str = ""


@dataclass(frozen=True, slots=True)
class PeerClosed:
    """The handoff stream is down, could not be opened, or went silent; `reason` is for a person."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class FromPeer:
    """`peer` is the incarnation of the node that sent it."""

    peer: str
    message: PrefillToDecode | DecodeToPrefill


@dataclass(frozen=True, slots=True)
class Draining:
    """The node was told to stop: finish what runs, refuse what comes."""


Event = SessionOpened | SessionLost | FromRouter | PeerOpened | PeerClosed | FromPeer | Draining

# ---- out ----


@dataclass(frozen=True, slots=True)
class ToRouter:
    epoch: int
    update: Update


@dataclass(frozen=True, slots=True)
class ToDecode:
    """To the decode node `target`; the shell opens the stream when there is none."""

    target: DecodeTarget
    message: PrefillToDecode


@dataclass(frozen=True, slots=True)
class ToPrefill:
    """To the prefill node of incarnation `peer`; dropped when its stream is gone (the role gets PeerClosed)."""

    peer: str
    message: DecodeToPrefill


@dataclass(frozen=True, slots=True)
class ClosePeer:
    """The transport lost the peer: close its handoff stream too. PeerClosed follows, as for every stream's end."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class CloseSession:
    """The router asks for more than a router may: end its session. SessionLost follows, as for every session's end."""

    epoch: int
    reason: str


Output = ToRouter | ToDecode | ToPrefill | ClosePeer | CloseSession


class Role(Protocol):
    """Runs on the engine's thread only. `now` is seconds of a monotonic clock."""

    def handle(self, event: Event, now: float) -> None:
        """Take one event in. Never blocks."""

    def prepare(self, now: float) -> None:
        """First half of a turn: transfers, deadlines, and what the next step shall compute."""

    def compute(self, now: float) -> bool:
        """Second half, with no event in between: launch the step. True: there is more to do at once.

        What `prepare` put out is on its way meanwhile. Nothing waits for a device here: its end is a wake-up.
        """

    @property
    def device_busy_since(self) -> float | None:
        """Since when (of `time.monotonic`) a device is at one step. None: it is at none."""

    def next_deadline(self) -> float | None:
        """When a turn must come even if nothing happens. None: never."""

    def take_outputs(self) -> list[Output]:
        """What came out since the last call, in order."""

    def load(self) -> Load: ...

    @property
    def idle(self) -> bool:
        """No request is on this node in any state, so that it may stop."""

    def check_integrity(self) -> None:
        """Raise AssertionError where the node's books disagree."""

    def audit(self, now: float) -> KvAudit:
        """Every block and slot, between two turns. The shell fills in `node_id`."""
