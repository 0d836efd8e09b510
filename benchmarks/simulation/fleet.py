"""Replays a trace over a fleet: the router's core, N prefill nodes and M decode nodes in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from baton.block_hash import chain
from baton.messages import Tokens, Update
from baton.node_info import NodeRole
from baton.rpc.streams import HEARTBEAT_S
from baton.sampling import SamplingParams
from benchmarks.simulation.clock import VirtualClock
from benchmarks.simulation.node import FleetNode, settings_of
from benchmarks.simulation.policies import EPOCH
from benchmarks.simulation.transport import FleetTransport
from deploy.bench.trace import Entry, TraceTokens
from engine.simulated.profile import load_profile
from node.events import (
    BlocksChanged,
    BlocksHeld,
    BlocksWanted,
    ClosePeer,
    FromPeer,
    Output,
    PeerOpened,
    SessionOpened,
    ToDecode,
    ToPrefill,
)
from node.kv_events.feed import KV_PERIOD_S
from router.requests.actions import Emit, ToNode
from router.requests.core import RouterCore
from router.requests.request_state import RequestEnd, RequestTimings, RoutedRequest

DEADLINE_S = 3600.0


@dataclass(slots=True)
class Answer:
    """What the client of one request saw. Times are in seconds since the trace began. `refused`: why there is no
    answer."""

    entry: Entry
    arrived: float
    token_times: list[float] = field(default_factory=list)
    timings: RequestTimings | None = None
    refused: str = ""


MakeRouter = Callable[[], RouterCore]


class Fleet:
    """`make_router`: decides where requests go. `node_flags`: of all nodes. Messages between processes take the
    profile's latency."""

    def __init__(
        self,
        num_prefill: int,
        num_decode: int,
        profile_name: str,
        make_router: MakeRouter,
        node_flags: Sequence[str] = (),
    ) -> None:
        self.clock = VirtualClock()
        self.router = make_router()
        self.answers: list[Answer] = []
        self.nodes: dict[str, FleetNode] = {}
        profile = load_profile(profile_name)
        self._latency_s = profile.link.latency_us * 1e-6
        self._live: dict[str, Answer] = {}
        self._opened: set[tuple[str, str]] = set()  # handoff streams, (prefill node, decode node)
        hub: dict[str, FleetTransport] = {}
        for role, count in ((NodeRole.PREFILL, num_prefill), (NodeRole.DECODE, num_decode)):
            settings = settings_of(role, profile_name, node_flags)
            for index in range(count):
                name = f"{role.value}-{index:03}"
                self.nodes[name] = FleetNode(name, settings, profile, self.clock, hub, self._carry)
        info = next(iter(self.nodes.values())).info
        self._vocab_size, self._block_size = info.vocab_size, info.layout.block_size

    def replay(self, entries: Sequence[Entry]) -> list[Answer]:
        """In order of the entries. Takes about a millisecond of CPU for each 20 tokens of answers."""
        for node in self.nodes.values():
            node.hear(SessionOpened(EPOCH))
            self.router.node_up(node.info, 0.0)
        self._beat()
        tokens = TraceTokens(self._vocab_size)
        for number, entry in enumerate(entries):
            answer = Answer(entry, entry.timestamp / 1e3)
            self.answers.append(answer)
            self.clock.at(answer.arrived, partial(self._submit, f"r{number}", answer, tokens))
        self._num_left = len(entries)
        self.clock.run(until=lambda: not self._num_left)
        return self.answers

    # ---- the router ----

    def _submit(self, request_id: str, answer: Answer, tokens: TraceTokens) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=answer.entry.output_length, ignore_eos=True)
        prompt = tokens.prompt(answer.entry)
        hashes = tuple(chain(prompt, self._block_size))
        request = RoutedRequest(request_id, prompt, 1, sampling, DEADLINE_S, block_hashes=hashes)
        self._live[request_id] = answer
        self.router.submit(request, self.clock.now())
        self._carry_out()

    def _updates(self, incarnation: str, updates: list[Update]) -> None:
        for update in updates:
            self.router.update(incarnation, update, self.clock.now())
        self._carry_out()

    def _carry_out(self) -> None:
        while self.router.actions:
            action = self.router.actions.popleft()
            match action:
                case ToNode(incarnation, message):
                    self._later(partial(self.nodes[incarnation].hear, message))
                case Emit(request_id, Tokens(_, _, token_ids)):
                    self._live[request_id].token_times += [self.clock.now()] * len(token_ids)
                case Emit(request_id, RequestEnd(error, timings)):
                    answer = self._live.pop(request_id)
                    answer.timings, answer.refused = timings, "" if error is None else str(error)
                    self._num_left -= 1

    def _beat(self) -> None:
        """Each node tells its load as often as over a network when nothing changes."""
        for node in self.nodes.values():
            self.router.node_load(node.name, node.load(), self.clock.now())
        self.clock.after(HEARTBEAT_S, self._beat)

    # ---- between nodes ----

    def _later(self, delivery: Callable[[], None]) -> None:
        self.clock.after(self._latency_s, delivery)

    def _carry(self, node: FleetNode, outputs: list[Output]) -> None:
        updates = list[Update]()
        for output in outputs:
            match output:
                case Update():
                    updates.append(output)
                case ToDecode(target, message):
                    self._open(node, self.nodes[target.incarnation])
                    self._later(partial(self.nodes[target.incarnation].hear, FromPeer(node.name, message)))
                case ToPrefill(peer, message):
                    self._later(partial(self.nodes[peer].hear, FromPeer(node.name, message)))
                case BlocksHeld(_, hashes):
                    node.feed.snapshot(hashes)
                case BlocksChanged(changes):
                    node.feed.changed(changes)
                case ClosePeer(peer, reason):
                    raise RuntimeError(f"{node.name} gave up {peer}: {reason}")
        if updates:
            self._later(partial(self._updates, node.name, updates))
        if not node.feed.is_empty and not node.publishes:
            node.publishes = True
            self.clock.after(KV_PERIOD_S, partial(self._publish, node))

    def _publish(self, node: FleetNode) -> None:
        """What its prefix cache holds now, as seldom as over a network."""
        node.publishes = False
        if node.feed.lacks_snapshot:
            node.feed.lacks_snapshot = False
            node.hear(BlocksWanted(EPOCH))
        while not node.feed.is_empty:
            self._later(partial(self.router.node_blocks, node.name, node.feed.take()))

    def _open(self, prefill: FleetNode, decode: FleetNode) -> None:
        """The two say hello to each other, before the first message between them."""
        if (prefill.name, decode.name) in self._opened:
            return
        self._opened.add((prefill.name, decode.name))

        def met(one: FleetNode, other: FleetNode) -> None:
            one.connect(other)
            one.hear(PeerOpened(other.name, other.part_blocks, other.info.layout, other.name))
            if one is decode:
                self._later(partial(met, prefill, decode))  # ahead of what the decode node has to say

        self._later(partial(met, decode, prefill))
