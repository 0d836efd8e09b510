"""Events and outputs: what a node's network thread and its engine thread exchange.

    asyncio thread  --Event-->  inbox   --> Role.handle(event, now)   engine thread
    asyncio thread  <--Output-- outbox  <-- Role.take_outputs()       engine thread

A role is a state machine: events and the time go in, outputs come out. It has no sockets and no clock, so tests can
drive it through any order of events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.audit import KvAudit
from baton.block_hash import BlockHash
from baton.handoff_messages import DecodeToPrefill, PrefillToDecode
from baton.layout import KvLayout
from baton.messages import Abort, DecodeTarget, Load, Migrate, Prefill, Update

# ---- in ----


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """A router has subscribed. The node takes no work of an epoch without a session."""

    epoch: int


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The router's stream ended, and with it all its work on this node."""

    epoch: int


@dataclass(frozen=True, slots=True)
class PeerOpened:
    """The handoff stream to or from another node is up: Hello exchanged, layouts compatible, transports connected.

    Of the peer: how many of a rank's blocks its slots hold; its `layout`, which may split the model across ranks
    differently; its `name`, for error messages.
    """

    peer: str
    part_blocks: int
    layout: KvLayout
    name: str = ""


@dataclass(frozen=True, slots=True)
class PeerClosed:
    """The handoff stream is down, could not be opened, or went silent; `reason` is human-readable."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class FromPeer:
    """`peer` is the incarnation of the sender."""

    peer: str
    message: PrefillToDecode | DecodeToPrefill


@dataclass(frozen=True, slots=True)
class TargetEvent:
    """On a decode node: an event of the stream that this node has opened to the target of a migration, rather than of a
    stream that a peer has opened."""

    event: PeerOpened | PeerClosed | FromPeer


@dataclass(frozen=True, slots=True)
class Draining:
    """The node drains: finish running work, refuse new work."""


@dataclass(frozen=True, slots=True)
class BlocksWanted:
    """The router needs a new snapshot of the prefix cache, because it read the changes too slowly."""

    epoch: int


PeerEvent = PeerOpened | PeerClosed | FromPeer | TargetEvent
Event = SessionOpened | SessionLost | Prefill | Abort | Migrate | PeerEvent | Draining | BlocksWanted
"""What a router says comes as it is; its session has checked that the attempt is of its own epoch."""

# ---- out ----


@dataclass(frozen=True, slots=True)
class ToDecode:
    """A message to the decode node `target`; if there is no stream to it, a Reserve makes the shell open one."""

    target: DecodeTarget
    message: PrefillToDecode


@dataclass(frozen=True, slots=True)
class ToPrefill:
    """A message to the prefill node of incarnation `peer`; dropped if its stream is gone (the role gets PeerClosed)."""

    peer: str
    message: DecodeToPrefill


@dataclass(frozen=True, slots=True)
class ClosePeer:
    """The transport lost the peer or a part: close the streams with it. PeerClosed follows, as for every stream's
    end."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class CloseSession:
    """The router exceeds its limits: end its session. SessionLost follows, as for every session's end."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class BlocksHeld:
    """For one router: the hashes of all blocks in the prefix cache. BlocksChanged outputs before it do not concern it,
    those after it do."""

    epoch: int
    hashes: Sequence[BlockHash]


@dataclass(frozen=True, slots=True)
class BlocksChanged:
    """For all routers: the hashes that came into the prefix cache or left it, and whether it holds them now."""

    changes: Mapping[BlockHash, bool]


Output = Update | ToDecode | ToPrefill | ClosePeer | CloseSession | BlocksHeld | BlocksChanged
"""Updates are for the routers of their attempts."""


class Role(Protocol):
    """Runs on the engine's thread only. `now` is seconds of a monotonic clock."""

    def handle(self, event: Event, now: float) -> None:
        """Take in one event. Never blocks."""

    def prepare(self, now: float) -> None:
        """First half of a turn: handle transfers and deadlines, and decide the next step."""

    def compute(self, now: float) -> bool:
        """Second half, with no event in between: launch the step. Returns whether there is more to do at once.

        The outputs of `prepare` are already being sent. Nothing here waits for a device: a step's end wakes the loop.
        """

    @property
    def device_busy_since(self) -> float | None:
        """Since when (`time.monotonic`) the device has been computing its current step. None: it is idle."""

    def next_deadline(self) -> float | None:
        """When the next turn must come even if nothing happens. None: never."""

    def take_outputs(self) -> list[Output]:
        """The outputs since the last call, in order."""

    def end_turn(self) -> None:
        """The turn's outputs are on their way: now do the work that nothing waits for."""

    def load(self) -> Load: ...

    @property
    def idle(self) -> bool:
        """Whether no request is on this node in any state, so that it may stop."""

    def check_integrity(self) -> None:
        """Raise AssertionError if the node's blocks, slots and requests disagree."""

    def audit(self, now: float) -> KvAudit:
        """Every block and slot, as of between two turns. The shell fills in `node_id`."""
