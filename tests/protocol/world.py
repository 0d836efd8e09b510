"""A router, prefill nodes and decode nodes in one thread, joined by a network that does its worst.

The nodes (`node`) and the router are the real ones; what is between them (`network`), devices and clock go on when they
are told to. `enabled()` lists what may happen next, `act()` makes it happen, and after each act the blocks, slots and
handoffs of every node that it touched are recounted.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Mapping
from typing import Any

from baton.block_hash import HASH_BYTES
from baton.errors import BatonError
from baton.handoff_messages import Reserve
from baton.layout import KvSlice
from baton.messages import Abort, AttemptId, End, Update
from baton.node_info import NodeRole
from baton.sampling import SamplingParams
from kv_transfer.parts import PartHeader
from kv_transfer.transports.memory import MemoryHub, Transfer
from node.events import (
    BlocksChanged,
    BlocksHeld,
    BlocksWanted,
    ClosePeer,
    Draining,
    Output,
    ToDecode,
    ToPrefill,
)
from router.requests.actions import Emit, ToNode
from router.requests.core import RouterCore
from router.requests.request_state import FirstToken, RoutedRequest
from tests.engine.beam_reference import beam_search
from tests.protocol.client import Client
from tests.protocol.fake_model import EOS, FakeModel, expected_output, most_likely
from tests.protocol.leftovers import leftovers
from tests.protocol.network import EPOCH, ROUTER, Links, Sessions, Streams
from tests.protocol.node import MAX_MODEL_LEN, Node, outward


class World:
    def __init__(
        self,
        num_prefill: int = 2,
        num_decode: int = 2,
        num_blocks: int = 40,
        num_slots: int = 3,
        first_token: FirstToken = "prefill",
        ranks: Mapping[NodeRole, tuple[KvSlice, ...]] = {},
        windows: tuple[int | None, ...] = (None, None),
        settings: Mapping[NodeRole, Mapping[str, Any]] = {},
        router: Mapping[str, Any] = {},
        has_grammars: bool = False,
    ) -> None:
        """settings: of the nodes' engines, where they differ from `Node`'s; router: of the router."""
        self.now = 0.0
        self.hub = MemoryHub()
        self.router = RouterCore(EPOCH, first_token=first_token, **router)
        self.nodes: dict[str, Node] = {}  # those alive, by incarnation
        self.clients: dict[str, Client] = {}
        self.stopping: set[str] = set()  # nodes that were told to stop
        self._recounted: dict[str, int] = {}  # `num_touches`, by incarnation
        self._audited: dict[str, int] = {}
        self._serials = itertools.count(1)
        self._streams = Streams()
        self._sessions = Sessions(self.router, self.nodes, self._streams, self._clock)
        self._links = Links(self.nodes, self._streams, self._serials)
        self._sizes = num_blocks, num_slots
        self._ranks, self._settings, self._has_grammars = ranks, settings, has_grammars
        self._make_model = functools.partial(FakeModel, windows=windows)
        self._clients_wait = first_token == "decode"
        for role, number in ((NodeRole.PREFILL, num_prefill), (NodeRole.DECODE, num_decode)):
            for index in range(number):
                self._start_node(f"{role.value}-{index}", role)

    def _clock(self) -> float:
        return self.now

    # ---- nodes and clients come and go ----

    def _start_node(self, name: str, role: NodeRole) -> None:
        incarnation = f"{name}.{next(self._serials)}"
        ranks = self._ranks.get(role, ())
        settings = self._settings.get(role, {})
        parts = self.hub, self._clock, *self._sizes, ranks, self._make_model, settings, self._has_grammars
        self.nodes[incarnation] = node = Node(name, role, incarnation, *parts)
        self._sessions.open(node)

    def _crash(self, incarnation: str, in_order: bool = False) -> None:
        """It dies, or leaves after its work and its last words, and another one takes its place."""
        if in_order:
            self._collect(incarnation)
        node = self.nodes.pop(incarnation)
        self.stopping.discard(incarnation)
        node.kill()
        self._streams.kill(incarnation, in_order)
        self._streams.kill(outward(incarnation), in_order)
        self._sessions.kill(node)
        self._links.kill(incarnation, in_order)
        self._start_node(node.name, node.role)

    def _leavers(self) -> list[str]:
        """Nodes that were told to stop and have no work any more."""
        nodes = [self.nodes[i] for i in sorted(self.stopping)]
        return [node.incarnation for node in nodes if node.idle and not node.has_turn()]

    def submit(
        self, prompt: tuple[int, ...], n: int, sampling: SamplingParams, deadline_s: float = 1e6, **fields: Any
    ) -> str:
        """fields: others of a `RoutedRequest`."""
        request_id = f"r{next(self._serials)}"
        want = expected_answers(prompt, n, sampling)
        request = RoutedRequest(request_id, prompt, n, sampling, deadline_s, **fields)
        try:
            self.router.submit(request, self.now)
            state = self.router.requests.get(request_id)
            assert state is not None
            self.clients[request_id] = Client(request, want, state, self._clients_wait)
        except BatonError:
            pass  # told at once: that is its end
        self._collect_router()
        return request_id

    def live(self) -> list[str]:
        return [r for r, client in self.clients.items() if client.end is None]

    # ---- what may happen ----

    def enabled(self) -> list[tuple[str, object]]:
        """All steps of the ordinary course of things that are possible now."""
        acts: list[tuple[str, object]] = [("deliver", stream) for stream in self._streams.busy()]
        acts += [("turn", i) for i, node in self.nodes.items() if node.has_turn()]
        acts += [("wait", i) for i, node in self.nodes.items() if node.goes_on_at is not None]
        acts += [("advance", i) for i, node in self.nodes.items() if node.model.is_busy]
        acts += [("transfer", i) for i in range(len(self.hub.pending))]
        acts += [("leave", i) for i in self._leavers()]
        return acts

    def faults(self) -> list[tuple[str, object]]:
        """What may go wrong now, or happen without a cause."""
        acts: list[tuple[str, object]] = [("crash", i) for i in self.nodes]
        acts += [("turn", i) for i in self.nodes]
        acts += [("break_session", i) for i, node in self.nodes.items() if node.subscribed]
        acts += [("break_link", link) for link in sorted(self._links.up)]
        acts += [("cancel", r) for r in self.live()]
        acts += [("stop", (r, s)) for r in self.live() for s in range(self.clients[r].request.n)]
        acts += [("repeat", stream) for stream in self._streams.busy()]
        acts += [("move", i) for i, node in self.nodes.items() if node.role is NodeRole.DECODE and node.subscribed]
        acts += [("damage", i) for i, transfer in enumerate(self.hub.pending) if is_checked(transfer)]
        return acts

    def act_at_random(self, draw: random.Random, faults: float) -> None:
        """One act, with that probability a fault, and every tenth time some time passes."""
        acts = self.faults() if draw.random() < faults else self.enabled()
        if acts:
            self.act(draw.choice(acts))
        if draw.random() < 0.1:
            self.advance(draw.choice([0.001, 0.05]))

    def act(self, act: tuple[str, object]) -> None:
        match act:
            case ("deliver", (str() as source, str() as target)):
                self._streams.deliver(source, target)
            case ("repeat", (str() as source, str() as target)):
                self._streams.repeat(source, target)
            case ("turn", str() as incarnation):
                self._turn(incarnation)
            case ("advance", str() as incarnation):
                self.nodes[incarnation].advance_device()
            case ("wait", str() as incarnation):
                due = self.nodes[incarnation].goes_on_at
                self.advance(max(0.0, (due or 0.0) - self.now))
            case ("transfer", int() as index):
                self.hub.deliver(index)
            case ("crash", str() as incarnation):
                self._crash(incarnation)
            case ("tell_to_stop", str() as incarnation):
                self.stopping.add(incarnation)
                self.nodes[incarnation].hear(Draining())
                self._sessions.tell_of_stop(self.nodes[incarnation])
            case ("leave", str() as incarnation):
                self._crash(incarnation, in_order=True)
            case ("break_session", str() as incarnation):
                self._sessions.break_off(self.nodes[incarnation])
            case ("break_link", (str() as me, str() as peer)):
                self._links.break_off(me, peer, "stream broke")
            case ("move", str() as incarnation):
                for drains in (True, False):
                    self.router.drain_node(incarnation, drains, self.now)
            case ("damage", int() as index):
                push = self.hub.pending[index].push
                push.owner.staging.memory(push.slot)[0] ^= 1
            case ("cancel", str() as request_id):
                self.router.cancel(request_id, self.now)
            case ("stop", (str() as request_id, int() as sample)):
                client = self.clients[request_id]
                if sample not in client.ended:
                    client.stopped.add(sample)
                self.router.stop_sample(request_id, sample, self.now)
            case _:
                raise AssertionError(act)
        self.settle()

    def advance(self, seconds: float) -> None:
        self._pass(seconds)
        self._audit()

    def run_dry(self, max_rounds: int = 3000) -> None:
        """Let the ordinary course of things go on until every request has ended and nothing is under way. An audit
        takes longer than all that a round does, so only some rounds end with one, and the last."""
        for number in range(max_rounds):
            for stream, queue in list(self._streams.queues.items()):
                while queue:
                    self._streams.deliver(*stream)
                    self.settle()
            while self.hub.pending:
                self.hub.deliver(0)
            for incarnation, node in list(self.nodes.items()):
                if node.has_turn():
                    self._turn(incarnation)
                if node.model.is_busy:
                    node.advance_device()
            for incarnation in self._leavers():
                self._crash(incarnation, in_order=True)
            self._pass(0.01)
            if number % 4 == 0:
                self._audit()
            busy = self.live() or self.hub.pending or self._streams.busy()
            if not busy and all(node.idle and node.feed.is_empty for node in self.nodes.values()):
                return self._audit()
        raise AssertionError(f"still at it: {self.live()}")

    def _pass(self, seconds: float) -> None:
        self.now += seconds
        self.router.tick(self.now)
        self.settle()

    def _audit(self) -> None:
        for node in self._touched(self._audited):
            node.check_audit()

    def check_credits(self) -> None:
        assert not self.hub.num_waiting_pushes, "a part has left for which no receive is posted"

    def check_whole(self) -> None:
        """Nothing is held anywhere."""
        for node in self.nodes.values():
            node.check_integrity()
            node.check_whole()
        assert not (left := leftovers(self.router, "router")), left
        for routed in self.router.pool._nodes.values():
            placed = routed.num_prompts, routed.to_prefill, routed.to_prefill_s, routed.to_decode, routed.num_answers
            assert not any(placed), placed
            assert not routed.num_promised
        for client in self.clients.values():
            assert client.end is not None
        self.check_index()

    def check_index(self) -> None:
        """The router knows all blocks in the prefix caches of its nodes, of the first KV group, and of no others."""
        index, total = self.router.prefix_index, set[bytes]()
        for node in self.nodes.values():
            if node.subscribed:
                hashes = [name for name in node.core.engine.blocks.hashes() if len(name) == HASH_BYTES]
                assert index.num_blocks(node.incarnation) == len(hashes)
                assert all(index.held([block_hash]).get(node.incarnation) == 1 for block_hash in hashes)
                total |= set(hashes)
        assert len(index) == len(total)

    # ---- what the machines decided is carried out ----

    def _turn(self, incarnation: str) -> None:
        node = self.nodes[incarnation]
        node.prepare()
        self._collect(incarnation)
        node.compute()

    def settle(self) -> None:
        """Carry all of it out, and recount what it has changed."""
        self._collect_router()
        for incarnation in list(self.nodes):
            self._collect(incarnation)
        for node in self._touched(self._recounted):
            node.check_integrity()
        self.check_credits()
        for client in self.clients.values():
            client.check()

    def _touched(self, since: dict[str, int]) -> list[Node]:
        """Nodes to which something has happened since these counts, which are brought up to date."""
        touched = [node for i, node in self.nodes.items() if since.get(i) != node.num_touches]
        since.update({node.incarnation: node.num_touches for node in touched})
        return touched

    def _collect(self, incarnation: str) -> None:
        updates = list[Update]()
        for output in self.nodes[incarnation].core.take_outputs():
            self._carry(incarnation, output, updates)
        if updates:
            self._sessions.tell_router(incarnation, updates)
        self._publish(self.nodes[incarnation])

    def _publish(self, node: Node) -> None:
        """What changed in its prefix cache, unless its last messages are still on their way: then it adds up."""
        if node.feed.lacks_snapshot:
            node.feed.lacks_snapshot = False
            node.hear(BlocksWanted(EPOCH))
        while not node.feed.is_empty and len(self._streams.queues.get((node.incarnation, ROUTER), ())) < 4:
            self._sessions.publish(node.incarnation, node.feed.take())

    def _carry(self, incarnation: str, output: Output, updates: list[Update]) -> None:
        """To the router goes what is added to `updates`."""
        node, links = self.nodes[incarnation], self._links
        match output:
            case Update() as update:
                assert update.attempt_id not in node.fenced or isinstance(update.kind, End), f"{update} after its abort"
                updates.append(update)
            case ToDecode(target, message):
                me = incarnation if node.role is NodeRole.PREFILL else outward(incarnation)
                if (me, target.incarnation) not in links.up and isinstance(message, Reserve):
                    links.open(me, target.incarnation)
                if (me, target.incarnation) in links.up:
                    links.say(me, target.incarnation, message)
            case ToPrefill(peer, message):
                for end in (peer, outward(peer)):
                    if (incarnation, end) in links.up:
                        links.say(incarnation, end, message)
            case ClosePeer(peer, reason):
                for me, end in ((incarnation, peer), (incarnation, outward(peer)), (outward(incarnation), peer)):
                    if (me, end) in links.up:
                        links.break_off(me, end, reason)
            case BlocksHeld(_, hashes):
                node.feed.snapshot(hashes)
            case BlocksChanged(changes):
                node.feed.changed(changes)

    def _collect_router(self) -> None:
        while self.router.actions:
            action = self.router.actions.popleft()
            match action:
                case ToNode(incarnation, message):
                    if incarnation in self.nodes and self.nodes[incarnation].subscribed:
                        self._sessions.tell_node(incarnation, message)
                        if isinstance(message, Abort) and not message.samples:
                            fenced = functools.partial(self._fenced, incarnation, message.attempt_id)
                            self._streams.send(ROUTER, incarnation, fenced)
                case Emit(request_id, event):
                    self.clients[request_id].take(event, self.now)

    def _fenced(self, incarnation: str, attempt_id: AttemptId) -> None:
        if incarnation in self.nodes:
            self._collect(incarnation)  # what it said before counts as said before
            self.nodes[incarnation].fenced.add(attempt_id)


def expected_answers(prompt: tuple[int, ...], n: int, sampling: SamplingParams) -> list[list[int]]:
    """Of n samples, or the n best of a beam search."""
    if width := sampling.beam_width:
        eos = () if sampling.ignore_eos else (EOS,)
        most = min(sampling.max_tokens, MAX_MODEL_LEN - len(prompt))
        found = beam_search(lambda tokens: most_likely(tokens, 2 * width), prompt, width, most, eos)
        return [list(tokens) for tokens, _ in found[:n]]
    ends = json.loads(sampling.structured_outputs.text) if sampling.structured_outputs else {}
    outputs = [expected_output(prompt, sampling, i, MAX_MODEL_LEN)[0] for i in range(n)]
    return [output[: ends.get("finishes_at")] for output in outputs]


def is_checked(transfer: Transfer) -> bool:
    """Whether damage to it must be seen."""
    return PartHeader.parse(transfer.push.header).checked
