"""A node with a scripted role instead of an engine, and a transport that only takes notes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from baton import wire
from baton.address import HostPort
from baton.audit import KvAudit, KvSlot
from baton.errors import TransferError
from baton.layout import KvLayout, LayerKv
from baton.messages import AttemptId, Load, Prefill, Sample, Subscribe
from baton.node_info import GenerationDefaults, NodeInfo, NodeRole, Route, TransportEndpoint
from baton.rpc.channels import open_channel
from baton.rpc.cluster_secret import SESSION, ClusterSecret, prove
from baton.sampling import SamplingParams
from baton.v1 import node_pb2_grpc
from engine.block_manager import BlockManager
from engine.holdings import Holding
from node.audit import make_audit, verdict
from node.events import Event, Output
from node.loop import Counts, NodeLoop
from node.settings import NodeSettings
from node.shell import Node, NodeParts, OutwardTransport, RoleSide

LAYOUT = KvLayout((LayerKv(2, 8, 8, "float32"),) * 2, 16, "print")
WAIT_S = 20.0


class ScriptedRole:
    """Answers each event with the outputs that `script` gives for it, in the same turn. Tests read `events`."""

    def __init__(self, script: Callable[[Event], list[Output]] = lambda _: []) -> None:
        self.script = script
        self.events: list[Event] = []
        self.outputs: list[Output] = []
        self.state = Load(num_blocks_free=3, num_blocks_total=3)
        self.is_idle = True
        self.device_busy_since: float | None = None
        self.broken: str | None = None
        self.blocks = BlockManager(4)
        self.holdings: list[Holding] = []
        self.slots: list[KvSlot] = []
        self._aio = asyncio.get_event_loop()
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def handle(self, event: Event, now: float) -> None:
        self.events.append(event)
        self.outputs += self.script(event)

    def prepare(self, now: float) -> None: ...

    def compute(self, now: float) -> bool:
        self._aio.call_soon_threadsafe(self._tell)
        return False

    def next_deadline(self) -> float | None:
        return None

    def take_outputs(self) -> list[Output]:
        outputs, self.outputs = self.outputs, []
        return outputs

    def end_turn(self) -> None: ...

    def load(self) -> Load:
        return self.state

    @property
    def idle(self) -> bool:
        return self.is_idle

    def check_integrity(self) -> None:
        assert self.broken is None, self.broken

    def audit(self, now: float) -> KvAudit:
        return make_audit(
            NodeRole.PREFILL,
            "i1",
            verdict(self.check_integrity),
            self.is_idle,
            self.blocks,
            self.holdings,
            self.slots,
            now,
        )

    async def saw(self, kind: type, count: int = 1) -> list[Any]:
        """All events of the kind, once there are `count`."""
        async with asyncio.timeout(WAIT_S):
            while len(found := [e for e in self.events if isinstance(e, kind)]) < count:
                future = self._aio.create_future()
                self._waiting.append((len(self.events), future))
                if len(self.events) == self._waiting[-1][0]:
                    await future
        return found

    def _tell(self) -> None:
        for _ in range(len(self._waiting)):
            seen, future = self._waiting.popleft()
            if len(self.events) == seen:
                self._waiting.append((seen, future))
            elif not future.done():
                future.set_result(None)


@dataclass
class NotingTransport:
    """Notes who is connected."""

    refuse: str | None = None
    notes: list[tuple[str, str]] = field(default_factory=list)
    routes: dict[str, Sequence[Route]] = field(default_factory=dict)

    def connect(self, peer: str, routes: Sequence[Route], timeout_s: float) -> None:
        if self.refuse:
            raise TransferError(self.refuse)
        self.notes.append(("connect", peer))
        self.routes[peer] = routes

    def disconnect(self, peer: str) -> None:
        self.notes.append(("disconnect", peer))

    def close(self) -> None: ...


@dataclass
class Running:
    node: Node
    role: ScriptedRole
    loop: NodeLoop
    transport: NotingTransport
    info: NodeInfo
    channel: grpc.aio.Channel

    @property
    def address(self) -> str:
        return str(self.node.address)

    def say(self, *outputs: Output) -> None:
        """Have the role put these out in its next turn."""
        self.loop.run_engine_call(lambda: self.role.outputs.extend(outputs))


def info_for(role: NodeRole, incarnation: str, layout: KvLayout = LAYOUT) -> NodeInfo:
    return NodeInfo(
        role=role,
        incarnation=incarnation,
        node_id=f"{role.value}-0",
        address="",
        served_model_name="tiny",
        max_model_len=64,
        max_num_seqs=4,
        num_blocks=3,
        layout=layout,
        endpoints=tuple(TransportEndpoint(rank, "memory", b"here") for rank in range(len(layout.ranks))),
        tokenizer_digest="d1",
        chat_template="",
        special_tokens={},
        generation_defaults=GenerationDefaults(),
        vocab_size=32,
    )


def make_node(
    side: RoleSide,
    role: NodeRole,
    *,
    incarnation: str = "i1",
    script: Callable[[Event], list[Output]] = lambda _: [],
    layout: KvLayout = LAYOUT,
    part_blocks: int = 4,
    tokenizer: bytes = b"{}",
    warm_up: Callable[[], None] = lambda: None,
    turn_timeout_s: float = 300.0,
    audit_s: float = WAIT_S,
    **flags: Any,
) -> tuple[Node, ScriptedRole, NodeLoop, NotingTransport]:
    """A node for a free port, not started."""
    settings = NodeSettings(model="none", listen=HostPort("127.0.0.1", 0), drain_timeout=WAIT_S, **flags)
    scripted, transport, loop = ScriptedRole(script), NotingTransport(), NodeLoop(turn_timeout_s=turn_timeout_s)
    info = info_for(role, incarnation, layout)
    parts = NodeParts(
        scripted,
        warm_up,
        transport,
        info,
        tokenizer,
        part_blocks,
        lambda: Counts({"free": 3}),
        8,
        lambda: 8,
        OutwardTransport(NotingTransport(), info.endpoints) if role is NodeRole.DECODE else None,
    )
    return Node(settings, side, parts, loop, audit_s=audit_s), scripted, loop, transport


@asynccontextmanager
async def running(
    side: RoleSide, role: NodeRole, *, incarnation: str = "i1", layout: KvLayout = LAYOUT, **fields: Any
) -> AsyncIterator[Running]:
    """A node on a free port, stopped at the end, and a channel to it. `fields` are those of `make_node`."""
    node, scripted, loop, transport = make_node(side, role, incarnation=incarnation, layout=layout, **fields)
    await node.start()
    addresses: dict[str, Any] = {"address": str(node.address), "metrics_address": str(node.metrics.address)}
    info = dataclasses.replace(info_for(role, incarnation, layout), **addresses)
    try:
        async with open_channel(str(node.address), node._settings.trust().tls) as channel:
            yield Running(node, scripted, loop, transport, info, channel)
    finally:
        assert await node.stop()


class RouterStream:
    """A router's end of a session."""

    def __init__(self, stub: Any, subscribe: Subscribe | None, secret: ClusterSecret | None = None) -> None:
        self.call = stub.Session()
        self._subscribe = subscribe
        self._secret = secret

    async def __aenter__(self) -> RouterStream:
        if self._secret and self._subscribe:
            await prove(self._secret, SESSION, str(self._subscribe.router_epoch), self.send, self.read)
        if self._subscribe:
            await self.send(self._subscribe)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.call.cancel()

    async def send(self, message: wire.RouterToNode) -> None:
        await self.call.write(wire.write_router_message(message))

    async def read(self) -> wire.NodeToRouter:
        async with asyncio.timeout(WAIT_S):
            answer = await self.call.read()
        assert answer is not grpc.aio.EOF  # type: ignore[attr-defined]
        return wire.read_node_message(answer)

    async def updates(self) -> tuple[Any, ...]:
        """The next message that is updates."""
        while not isinstance(message := await self.read(), tuple):
            pass
        return message

    async def rest(self) -> AsyncIterator[wire.NodeToRouter]:
        """What is left of the session, without how it ended."""
        async with asyncio.timeout(WAIT_S):
            with contextlib.suppress(grpc.aio.AioRpcError):
                while (message := await self.call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                    yield wire.read_node_message(message)

    async def end(self) -> tuple[str, str]:
        """Status and text with which the node ended the session."""
        async with asyncio.timeout(WAIT_S):
            try:
                while await self.call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
                    pass
            except grpc.aio.AioRpcError:
                pass
            return (await self.call.code()).name, await self.call.details()


def session(node: Running, epoch: int = 1, target: str = "i1", **fields: Any) -> RouterStream:
    stub = node_pb2_grpc.PrefillNodeStub(node.channel)
    return RouterStream(stub, Subscribe(epoch, target, **fields))


def prefill(attempt_id: AttemptId, **fields: Any) -> Prefill:
    base = Prefill(attempt_id, "i1", (1, 2, 3), (Sample(0),), SamplingParams(), 5.0)
    return dataclasses.replace(base, **fields)
