"""Routers, prefill nodes and decode nodes in one thread, joined by a network that does its worst.

The state machines, engine, block manager, senders and receivers are the real ones; the model is `FakeModel`, a device
that computes one layer of one chunk at a time, when it is told to; the transport is `memory` with delivery by hand.
Each stream is a queue that keeps its order, as gRPC streams do; between streams any order is possible. `enabled()`
lists what may happen next, `act()` makes it happen, and after each act every node's blocks, slots and handoffs are
recounted.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.audit import KvAudit, KvUse
from baton.errors import BatonError
from baton.messages import (
    Abort,
    DecodeToPrefill,
    End,
    GenerationDefaults,
    NodeInfo,
    NodeRole,
    PrefillToDecode,
    Update,
    WorkId,
)
from baton.sampling import SamplingParams
from decode_node.core import DecodeCore
from engine.config import EngineConfig
from engine.engine import Engine
from engine.node.events import (
    ClosePeer,
    Event,
    FromPeer,
    FromRouter,
    PeerClosed,
    PeerOpened,
    SessionLost,
    SessionOpened,
    ToDecode,
    ToPrefill,
    ToRouter,
)
from kv_transfer.memory import MemoryHub, MemoryTransport, Transfer
from kv_transfer.parts import PartHeader, slot_bytes_for
from kv_transfer.receiver import KvReceiver
from kv_transfer.sender import KvSender
from kv_transfer.staging import Staging
from prefill_node.core import PrefillCore
from router.core import Emit, RouterCore, ToNode
from router.life import FirstToken, RoutedRequest
from tests.protocol.client import Client
from tests.protocol.fake_model import EOS, VOCAB_SIZE, FakeModel, expected_output

BLOCK_SIZE = 4
MAX_MODEL_LEN = 64
PART_BLOCKS = 2
EPOCH = 7


@dataclass
class Node:
    """A process: `name` survives its death, `incarnation` does not."""

    name: str
    role: NodeRole
    incarnation: str
    core: PrefillCore | DecodeCore
    transport: MemoryTransport
    staging: Staging
    model: FakeModel
    info: NodeInfo
    subscribed: bool = False  # as the router sees it
    fenced: set[WorkId] = field(default_factory=set)  # work that it was told to abort
    awake: bool = True  # its loop has a reason for a turn

    def wake(self) -> None:
        self.awake = True

    def hear(self, event: Event, now: float) -> None:
        self.wake()
        self.core.handle(event, now)

    def has_turn(self, now: float) -> bool:
        """Whether the engine's thread would have a turn now: it sleeps until something wakes it, or a deadline."""
        deadline = self.core.next_deadline()
        return self.awake or (deadline is not None and deadline <= now)

    def pool_is_whole(self) -> bool:
        blocks = self.core.engine.blocks
        return blocks.num_free + blocks.num_cached == blocks.num_total


class World:
    def __init__(
        self,
        num_prefill: int = 2,
        num_decode: int = 2,
        num_blocks: int = 40,
        num_slots: int = 3,
        first_token: FirstToken = "prefill",
    ) -> None:
        self.now = 0.0
        self.hub = MemoryHub()
        self.router = RouterCore(EPOCH, first_token=first_token)
        self.nodes: dict[str, Node] = {}
        self.clients: dict[str, Client] = {}
        self.streams: dict[tuple[str, str], deque[Callable[[], None]]] = {}  # (from, to) -> deliveries, in order
        self.links: dict[tuple[str, str], int] = {}  # (me, peer) -> the handoff stream that is up, as `me` believes
        self._serial = itertools.count(1)
        self._sizes = (num_blocks, num_slots)
        self._clients_wait = first_token == "decode"
        for role, number in ((NodeRole.PREFILL, num_prefill), (NodeRole.DECODE, num_decode)):
            for index in range(number):
                self.start_node(f"{role.value}-{index}", role)

    # ---- nodes ----

    def start_node(self, name: str, role: NodeRole) -> None:
        num_blocks, num_slots = self._sizes
        model = FakeModel(num_blocks, BLOCK_SIZE)
        config = EngineConfig(
            num_blocks=num_blocks,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS,),
            block_size=BLOCK_SIZE,
            max_num_seqs=6,
            max_num_batched_tokens=10,
            async_scheduling=name.endswith("1"),  # of each role one node runs ahead
        )
        engine = Engine(config, model, clock=lambda: self.now)
        model.blocks = engine.blocks
        incarnation = f"{name}.{next(self._serial)}"
        staging = Staging(num_slots, slot_bytes_for(PART_BLOCKS, model.layout.block_bytes), "cpu")
        transport = MemoryTransport(self.hub, incarnation, staging, lambda: self._wake(incarnation))
        core: PrefillCore | DecodeCore
        if role is NodeRole.PREFILL:
            sender = KvSender(transport, staging, model.pool_bytes, model.layout)
            whole_tokens = 6 if config.async_scheduling else 0
            core = PrefillCore(engine, sender, incarnation=incarnation, layer_groups=2, whole_tokens=whole_tokens)
        else:
            verify = not config.async_scheduling
            receiver = KvReceiver(transport, staging, model.pool_bytes, model.layout, verify=verify)
            core = DecodeCore(engine, receiver, incarnation=incarnation)
        info = NodeInfo(
            role=role, incarnation=incarnation, node_id=name, address=name, served_model_name="fake",
            max_model_len=MAX_MODEL_LEN, max_num_seqs=6, num_blocks=num_blocks, layout=model.layout, endpoints=(),
            tokenizer_digest="", chat_template="", special_tokens={}, generation_defaults=GenerationDefaults(),
            vocab_size=VOCAB_SIZE,
        )  # fmt: skip
        self.nodes[incarnation] = Node(name, role, incarnation, core, transport, staging, model, info)
        self.subscribe(incarnation)

    def _wake(self, incarnation: str) -> None:
        if incarnation in self.nodes:
            self.nodes[incarnation].wake()

    def subscribe(self, incarnation: str) -> None:
        node = self.nodes[incarnation]

        def opened() -> None:
            node.hear(SessionOpened(EPOCH), self.now)
            self._send(incarnation, "router", lambda: self._node_up(node))

        self._send("router", incarnation, opened)

    def _node_up(self, node: Node) -> None:
        node.subscribed = True
        self.router.node_up(node.info, self.now)

    def break_session(self, incarnation: str) -> None:
        """The router's stream to a living node breaks; what was under way is lost, from some message on."""
        node = self.nodes[incarnation]
        self._cut("router", incarnation)
        self._cut(incarnation, "router")
        self._send("router", incarnation, lambda: node.hear(SessionLost(EPOCH), self.now))

        def lost() -> None:
            node.subscribed = False
            self.router.node_lost(incarnation, "stream broke", self.now)
            if incarnation in self.nodes:
                self.subscribe(incarnation)

        self._send(incarnation, "router", lost)

    def crash(self, incarnation: str) -> None:
        node = self.nodes.pop(incarnation)
        self.hub.kill(incarnation)
        for stream in [s for s in self.streams if incarnation in s]:
            self._cut(*stream)
            if stream[1] == incarnation:
                del self.streams[stream]
        self._send(incarnation, "router", lambda: self.router.node_lost(incarnation, "died", self.now))
        for peer in sorted({p for link in self.links if incarnation in link for p in link} - {incarnation}):
            self._break_link(incarnation, peer, "died")
        self.links = {x: link for x, link in self.links.items() if x[0] != incarnation}
        self.start_node(node.name, node.role)

    # ---- handoff streams ----

    def _open_link(self, prefill: str, decode: str) -> None:
        """The prefill node says hello and goes on talking; each end connects its transport when it hears the other."""
        link = self.links[prefill, decode] = next(self._serial)

        def hello() -> None:
            if (decode, prefill) in self.links:
                self._close_link(decode, prefill, self.links[decode, prefill], "replaced")
            self.links[decode, prefill] = link
            self._link_up(decode, prefill, link)
            self._send(decode, prefill, lambda: self._link_up(prefill, decode, link))

        if decode in self.nodes:
            self._send(prefill, decode, hello)
        else:
            self._send(decode, prefill, lambda: self._close_link(prefill, decode, link, "connection refused"))

    def _link_up(self, me: str, peer: str, link: int) -> None:
        if me in self.nodes and peer in self.nodes and self.links.get((me, peer)) == link:
            self.nodes[me].transport.connect(peer, self.nodes[peer].transport.info(), 1.0)
            self.nodes[me].hear(PeerOpened(peer, PART_BLOCKS), self.now)

    def _break_link(self, me: str, peer: str, reason: str) -> None:
        """All streams between the two break: each end hears of it in its own time."""
        for this, other in ((me, peer), (peer, me)):
            self._cut(other, this)
            for link in {self.links.get((me, peer)), self.links.get((peer, me))} - {None}:
                self._send(other, this, functools.partial(self._close_link, this, other, link, reason))

    def _close_link(self, me: str, peer: str, link: int | None, reason: str) -> None:
        if me in self.nodes and self.links.get((me, peer)) == link:
            del self.links[me, peer]
            self.nodes[me].transport.disconnect(peer)
            self.nodes[me].hear(PeerClosed(peer, reason), self.now)

    def _say(self, me: str, peer: str, message: PrefillToDecode | DecodeToPrefill) -> None:
        link = self.links[me, peer]

        def delivery() -> None:
            if peer in self.nodes and self.links.get((peer, me)) == link:
                self.nodes[peer].hear(FromPeer(me, message), self.now)

        self._send(me, peer, delivery)

    # ---- streams ----

    def _send(self, source: str, target: str, delivery: Callable[[], None]) -> None:
        self.streams.setdefault((source, target), deque()).append(delivery)

    def _deliver(self, source: str, target: str, event: Event) -> None:
        def delivery() -> None:
            if target in self.nodes:
                self.nodes[target].hear(event, self.now)
                assert self.nodes[target].core.engine.blocks.now == self.now

        self._send(source, target, delivery)

    def _tell_router(self, incarnation: str, updates: list[Update]) -> None:
        """All that one turn has to tell travels as one message: a token and its sample's end are never parted."""

        def delivery() -> None:
            for update in updates:
                self.router.update(incarnation, update, self.now)

        self._send(incarnation, "router", delivery)

    def _cut(self, source: str, target: str) -> None:
        """A stream breaks: its second half was not on the wire yet."""
        stream = self.streams.get((source, target), deque())
        for _ in range(len(stream) // 2):
            stream.pop()

    def _collect(self, incarnation: str) -> None:
        node, updates = self.nodes[incarnation], list[Update]()
        for output in node.core.take_outputs():
            match output:
                case ToRouter(_, update):
                    assert update.work not in node.fenced or isinstance(update.kind, End), f"{update} after its abort"
                    updates.append(update)
                case ToDecode(target, message):
                    peer = target.incarnation
                    if (incarnation, peer) not in self.links:
                        self._open_link(incarnation, peer)
                    self._say(incarnation, peer, message)
                case ToPrefill(peer, message):
                    if (incarnation, peer) in self.links:
                        self._say(incarnation, peer, message)
                case ClosePeer(peer, reason):
                    if (incarnation, peer) in self.links:
                        self._break_link(incarnation, peer, reason)
        if updates:
            self._tell_router(incarnation, updates)

    def _collect_router(self) -> None:
        for action in self.router.take_actions():
            match action:
                case ToNode(incarnation, message):
                    if incarnation in self.nodes and self.nodes[incarnation].subscribed:
                        self._deliver("router", incarnation, FromRouter(EPOCH, message))
                        if isinstance(message, Abort) and not message.samples:
                            self._send(
                                "router", incarnation, functools.partial(self._fenced, incarnation, message.work)
                            )
                case Emit(request_id, event):
                    self.clients[request_id].take(event, self.now)

    def _fenced(self, incarnation: str, work: WorkId) -> None:
        if incarnation in self.nodes:
            self._collect(incarnation)  # what it said before counts as said before
            self.nodes[incarnation].fenced.add(work)

    # ---- clients ----

    def submit(self, prompt: tuple[int, ...], n: int, sampling: SamplingParams, deadline_s: float = 1e6) -> str:
        request_id = f"r{next(self._serial)}"
        want = [expected_output(prompt, sampling, i, MAX_MODEL_LEN)[0] for i in range(n)]
        request = RoutedRequest(request_id, prompt, n, sampling, deadline_s)
        try:
            self.router.submit(request, self.now)
            life = self.router._requests[request_id]
            self.clients[request_id] = Client(request, want, life, self._clients_wait)
        except BatonError:
            pass  # told at once: that is its end
        self._collect_router()
        return request_id

    def live(self) -> list[str]:
        return [r for r, client in self.clients.items() if client.end is None]

    # ---- what may happen ----

    def enabled(self) -> list[tuple[str, object]]:
        """All steps of the ordinary course of things that are possible now."""
        acts: list[tuple[str, object]] = [("deliver", s) for s, queue in self.streams.items() if queue]
        acts += [("turn", i) for i, node in self.nodes.items() if node.has_turn(self.now)]
        acts += [("wait", i) for i, node in self.nodes.items() if node.core.engine.launch_at is not None]
        acts += [("advance", i) for i, node in self.nodes.items() if node.model.is_busy]
        acts += [("transfer", i) for i in range(len(self.hub.pending))]
        return acts

    def faults(self) -> list[tuple[str, object]]:
        """What may go wrong now, or happen without a cause."""
        acts: list[tuple[str, object]] = [("crash", i) for i in self.nodes]
        acts += [("turn", i) for i in self.nodes]
        acts += [("break_session", i) for i, node in self.nodes.items() if node.subscribed]
        acts += [("break_link", link) for link in sorted(self.links)]
        acts += [("cancel", r) for r in self.live()]
        acts += [("stop", (r, s)) for r in self.live() for s in range(self.clients[r].request.n)]
        acts += [("repeat", s) for s, queue in self.streams.items() if queue]
        acts += [("damage", i) for i, transfer in enumerate(self.hub.pending) if is_checked(transfer)]
        return acts

    def act(self, act: tuple[str, object]) -> None:
        match act:
            case ("deliver", (str() as source, str() as target)):
                self.streams[source, target].popleft()()
            case ("repeat", (str() as source, str() as target)):
                self._repeat(source, target)
            case ("turn", str() as incarnation):
                self._turn(incarnation)
            case ("advance", str() as incarnation):
                self._compute(self.nodes[incarnation])
            case ("wait", str() as incarnation):
                due = self.nodes[incarnation].core.engine.launch_at
                self.advance(max(0.0, (due or 0.0) - self.now))
            case ("transfer", int() as index):
                self.hub.deliver(index)
            case ("crash", str() as incarnation):
                self.crash(incarnation)
            case ("break_session", str() as incarnation):
                self.break_session(incarnation)
            case ("break_link", (str() as me, str() as peer)):
                self._break_link(me, peer, "stream broke")
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

    def _turn(self, incarnation: str) -> None:
        node = self.nodes[incarnation]
        node.awake, core = False, node.core
        core.prepare(self.now)
        assert core.engine.blocks.now == self.now
        self._collect(incarnation)
        if core.compute(self.now):
            node.wake()
        elif node.role is NodeRole.DECODE and (due := core.engine.launch_at) is not None and due > self.now:
            deadline = core.next_deadline()
            assert deadline is not None, "a launch is put off for ever"
            assert deadline <= due, "a launch is put off for too long"

    def _compute(self, node: Node) -> None:
        """The device moves on, and wakes who waits for that."""
        node.model.advance()
        node.wake()

    def _repeat(self, source: str, target: str) -> None:
        """A message comes twice, the second time after all that follows it on its stream."""
        head = self.streams[source, target][0]
        if getattr(head, "__name__", "") == "delivery":  # a message, not a stream's own opening or end
            self.streams[source, target].append(head)

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.router.tick(self.now)
        self.settle()
        for node in self.nodes.values():
            check_audit(node.core.audit(self.now), self.now)

    def settle(self) -> None:
        """Carry out what the machines decided, and recount everything."""
        self._collect_router()
        for incarnation in list(self.nodes):
            self._collect(incarnation)
        for node in self.nodes.values():
            node.core.check_integrity()
            node.staging.check_integrity()
        for client in self.clients.values():
            client.check()

    # ---- the end ----

    def run_dry(self, max_rounds: int = 3000) -> None:
        """Let the ordinary course of things go on until every request has ended and nothing is under way."""
        for _ in range(max_rounds):
            for queue in list(self.streams.values()):
                while queue:
                    queue.popleft()()
                    self.settle()
            while self.hub.pending:
                self.hub.deliver(0)
            for incarnation, node in list(self.nodes.items()):
                if node.has_turn(self.now):
                    self._turn(incarnation)
                if node.model.is_busy:
                    self._compute(node)
            self.advance(0.01)
            if not self.live() and not self.hub.pending and not any(self.streams.values()) and self._idle():
                return
        raise AssertionError(f"still at it: {self.live()}")

    def _idle(self) -> bool:
        return all(node.core.idle and node.core.device_busy_since is None for node in self.nodes.values())

    def check_whole(self) -> None:
        """Nothing is held anywhere."""
        for node in self.nodes.values():
            assert node.pool_is_whole(), f"{node.incarnation} holds blocks"
            assert node.staging.num_free == node.staging.num_slots, f"{node.incarnation} holds slots"
            assert node.core.engine.num_reserved_seqs == 0
        for role in NodeRole:
            assert all(not placed.to_prefill and not placed.to_decode for placed in self.router.pool.role(role))
        for client in self.clients.values():
            assert client.end is not None


def is_checked(transfer: Transfer) -> bool:
    """Whether damage to it must be seen."""
    return PartHeader.parse(transfer.push.header).checked


def check_audit(audit: KvAudit, now: float) -> None:
    """It names an owner for all that is counted, and nobody else."""
    assert audit.integrity == "ok"
    listed = Counter(block.state for block in audit.blocks)
    assert listed == {state: count for state, count in audit.num_blocks.items() if count and state != "free"}
    for block in audit.blocks:
        uses = Counter(audit.holders[index].use for index in block.holders)
        assert (uses[KvUse.OWNS], uses[KvUse.READS], uses[KvUse.WRITES]) == (block.ref, block.readers, block.writer)
        assert bool(block.hash) or block.state != "cached"
    assert {index for block in audit.blocks for index in block.holders} == set(range(len(audit.holders)))
    assert all(0 <= entry.age_s <= now for entry in (*audit.holders, *audit.blocks))
    assert audit.num_slots == Counter(slot.state for slot in audit.slots)
    assert all((slot.state == "free") == (not slot.peer) for slot in audit.slots)
    if audit.idle:  # a launched step may still name blocks of a sequence that ended
        assert {holder.state for holder in audit.holders} <= {"finished"}
