"""A node of a fleet: everything of a simulated node except its sockets and its thread."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

from baton.messages import Load
from baton.node_info import NodeInfo, NodeRole
from baton.settings import parse
from benchmarks.simulation.clock import VirtualClock
from benchmarks.simulation.transport import FleetTransport
from decode_node import node as decode_node
from decode_node.settings import DecodeSettings
from engine.simulated.profile import Profile
from kv_transfer.ranks import rank_name
from kv_transfer.slots import Slots
from node.base import Base, Link
from node.describe import describe
from node.events import Event, Output
from node.kv_events.feed import KvFeed
from node.logits_processors import LogitsProcessors
from node.settings import NodeSettings
from node.simulated import simulate, slots_for
from prefill_node import node as prefill_node
from prefill_node.settings import PrefillSettings

_LEAST_WAIT_S = 1e-6
"""So that a deadline which has passed does not stop the time."""


def settings_of(role: NodeRole, profile_name: str, flags: Sequence[str] = ()) -> NodeSettings:
    """Those of `baton-prefill` or `baton-decode` with these flags. Exits with a line for the user if one is wrong."""
    kind = PrefillSettings if role is NodeRole.PREFILL else DecodeSettings
    return parse(kind, ["--model=baton-tiny", "--engine=simulated", f"--profile={profile_name}", *flags])


class FleetNode:
    """Its loop has turns as `node.loop.NodeLoop` has them. `carry` takes the outputs of each half of a turn."""

    def __init__(
        self,
        name: str,
        settings: NodeSettings,
        profile: Profile,
        clock: VirtualClock,
        hub: dict[str, FleetTransport],
        carry: Callable[[FleetNode, list[Output]], None],
    ) -> None:
        role = NodeRole.PREFILL if isinstance(settings, PrefillSettings) else NodeRole.DECODE
        self.name = name
        self._clock = clock
        self.feed = KvFeed()
        self.publishes = False  # whether what the feed has is about to be sent
        self._carry = carry
        self._wakes: set[float] = set()  # when turns are due
        self._alarm: float | None = None  # the earliest deadline for which the clock comes back
        built = simulate(settings, profile, clock.now, self._wake_at)
        staging = slots_for(settings, profile, built, clock.now)
        link_bytes_per_s = profile.link.bandwidth_gb_s * 1e9
        transport = FleetTransport(name, hub, clock, link_bytes_per_s, self.wake)

        def make_links(num_slots: int) -> list[Link]:
            slots = Slots(num_slots, staging.slot_bytes, clock.now)
            return [Link(slots, FleetTransport(f"{name}, outward", hub, clock, link_bytes_per_s, self.wake))]

        links = [Link(staging, transport)]
        base = Base(settings, built, links, make_links, name, None, LogitsProcessors({}))
        made = prefill_node.make_role(base) if role is NodeRole.PREFILL else decode_node.make_role(base)
        self.core, self._mover = made.core, made.mover
        self.part_blocks = made.mover.part_blocks
        self.engine = built.engine
        described = describe(settings, role, built, name, [transport.info()])
        self.info: NodeInfo = dataclasses.replace(described, node_id=name, address=name)

    def connect(self, peer: FleetNode) -> None:
        """Make the peer's transport reachable; both ends do."""
        (mover,) = self._mover.ranks  # type: ignore[attr-defined]
        mover.transport.connect(rank_name(peer.name, 0), peer.info.endpoints[0].address)

    def hear(self, event: Event) -> None:
        self.core.handle(event, self._clock.now())
        self.wake()

    def load(self) -> Load:
        return self.core.load()

    def wake(self) -> None:
        """Have a turn now, after whatever else is due now."""
        self._wake_at(self._clock.now())

    def _wake_at(self, when: float) -> None:
        if when not in self._wakes:
            self._wakes.add(when)
            self._clock.at(when, partial(self._turn, when))

    def _turn(self, woken: float) -> None:
        self._wakes.discard(woken)
        core, now = self.core, self._clock.now()
        core.prepare(now)
        self._carry(self, core.take_outputs())
        busy = core.compute(now)
        self._carry(self, core.take_outputs())
        if busy:
            self.wake()
        elif (deadline := core.next_deadline()) is not None:
            self._set_alarm(max(deadline, now + _LEAST_WAIT_S))

    def _set_alarm(self, when: float) -> None:
        if self._alarm is None or when < self._alarm:
            self._alarm = when
            self._clock.at(when, partial(self._ring, when))

    def _ring(self, when: float) -> None:
        """The deadline may have moved since."""
        if when != self._alarm:
            return
        self._alarm = None
        if (deadline := self.core.next_deadline()) is not None:
            if deadline <= when:
                self.wake()
            else:
                self._set_alarm(deadline)
