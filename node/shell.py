"""A serving node: gRPC server, engine thread and metrics page around one role."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from prometheus_client import CollectorRegistry

from baton import PROTOCOL_VERSION
from baton.address import HostPort
from baton.audit import KvAudit
from baton.handoff_messages import Hello
from baton.node_info import NodeInfo, TransportEndpoint
from baton.process.open_files import max_open_files
from baton.rpc.channels import bind, node_server_options
from baton.rpc.single_requests import SingleRequests
from baton.rpc.streams import HEARTBEAT_S, HELLO_S
from baton.rpc.trust import Trust
from baton.telemetry import AdminGate, ExpertReadings, MetricsServer, NodeMetrics, new_registry
from baton.v1 import node_pb2_grpc
from baton.wire import Limits
from node.audit import verdict
from node.auditor import Auditor
from node.errors import StartupError
from node.events import Draining, Role
from node.handoffs.stream import HandoffEnd, PeerTransport
from node.loop import Counts, NodeLoop, Turn
from node.peers.nodes import PeerNodes
from node.profiling import Profiling, Watch
from node.sessions import Sessions
from node.settings import NodeSettings
from node.status import Health, NodeStatus, admin_pages

log = logging.getLogger(__name__)

GRACE_S = 0.5
"""Time to send the last messages, once the server accepts no more calls; and for the engine's thread to say whether any
work is left."""
THREAD_STOP_S = 10.0
AUDIT_S = 30.0
"""Timeout of an audit, which waits for the current turn."""


class PeerStreams(Protocol):
    """A role's handoff streams in one direction."""

    def deliver(self, turn: Turn) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class OutwardTransport:
    """The transport that sends to nodes of the same role (migrations), and the addresses of its ranks."""

    transport: PeerTransport
    endpoints: tuple[TransportEndpoint, ...]


class Closeable(Protocol):
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class NodeParts:
    """The parts of a node except its network. `info.address` is filled in once the port is known.

    `warm_up` is called on the role's thread, before any request; it may take seconds, and raises ValueError. `count` is
    called there too, `count_free_slots` and the readings of `experts` on any thread. `watch_steps`: see
    `StepCounters.watch`; likewise there. `peers`: the other data parallel nodes.
    """

    role: Role
    warm_up: Callable[[], None]
    transport: PeerTransport
    info: NodeInfo
    tokenizer: bytes
    part_blocks: int
    count: Callable[[], Counts]
    num_slots: int
    count_free_slots: Callable[[], int]
    outward: OutwardTransport | None = None
    watch_steps: Watch = lambda _: None
    kv_events: Closeable | None = None
    experts: ExpertReadings | None = None
    peers: PeerNodes | None = None

    def close(self) -> None:
        """End all transfers and threads of the transports, the publisher of KV events, and the links to peers."""
        if self.kv_events is not None:
            self.kv_events.close()
        self.transport.close()
        if self.outward is not None:
            self.outward.transport.close()
        if self.peers is not None:
            self.peers.close()


@dataclass(frozen=True, slots=True)
class RoleSide:
    """What a role adds to the shell. `serve` registers its gRPC service, named `service`, and returns its streams to
    other nodes."""

    service: str
    serve: Callable[[grpc.aio.Server, Sessions, NodeParts, HandoffEnd], Sequence[PeerStreams]]


def make_hello(info: NodeInfo, part_blocks: int) -> Hello:
    """How a node introduces itself to others."""
    return Hello(
        incarnation=info.incarnation,
        node_id=info.node_id,
        layout=info.layout,
        endpoints=info.endpoints,
        part_blocks=part_blocks,
        protocol_version=PROTOCOL_VERSION,
    )


class Node:
    """Serves from `start` to `stop`. `loop` is the engine's thread, which the parts' transport wakes.

    `failure` gets the exception if the engine's thread or the delivery of its outputs fails: the process must end then.
    """

    def __init__(
        self, settings: NodeSettings, side: RoleSide, parts: NodeParts, loop: NodeLoop, *, audit_s: float = AUDIT_S
    ) -> None:
        self._settings = settings
        self._side = side
        self._parts = parts
        self._loop = loop
        self._gate = AdminGate(settings.admin_key_file)
        role = parts.role
        self._auditor = Auditor(loop.run_engine_call, lambda: verdict(role.check_integrity), self._take_audit, audit_s)
        name = settings.name(parts.info.role)
        self._profiling = Profiling(settings.profile_dir, name, loop.run_engine_call, parts.watch_steps)
        self._why_not: str | None = "starting"
        self._idle = asyncio.Event()
        self._first_turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failure: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Raises StartupError if an address cannot be bound or the engine fails meanwhile, and what `warm_up`
        raises."""
        for warning in self._settings.warnings(self._settings.listen):
            log.warning(warning)
        trust = self._settings.trust()
        options = node_server_options(max_open_files())
        self._server = grpc.aio.server(interceptors=[SingleRequests(HELLO_S)], options=options)
        port = self._bind(self._settings.listen, trust)
        self.address = self._settings.advertised(port)
        registry = new_registry(self._parts.info.role.value)
        self.metrics = self._serve_metrics(registry)
        metrics_address = str(HostPort(self.address.host, self.metrics.address.port))
        info = dataclasses.replace(self._parts.info, address=str(self.address), metrics_address=metrics_address)
        self._metrics = NodeMetrics(registry, info.served_model_name)
        self._metrics.set_cache_config(info.layout.block_size, info.num_blocks, info.layout.layers[0].dtype)
        self._metrics.watch_slots(self._parts.num_slots, self._parts.count_free_slots)
        if self._parts.experts is not None:
            self._metrics.watch_experts(self._parts.experts)
        limits = Limits.of(info, self._settings.request_timeout)
        self._sessions = Sessions(info.incarnation, self._loop.post, self._metrics, limits, trust)
        ours = HandoffEnd(
            hello=make_hello(info, self._parts.part_blocks),
            transport=self._parts.transport,
            post=self._loop.post,
            handled=lambda: asyncio.wrap_future(self._loop.run_engine_call(lambda: None)),
            trust=trust,
            limits=limits,
            silence_s=self._settings.silence_timeout,
        )
        self._streams = self._side.serve(self._server, self._sessions, self._parts, ours)
        status = NodeStatus(info, self._parts.tokenizer, self._auditor, self._gate)
        node_pb2_grpc.add_NodeStatusServicer_to_server(status, self._server)  # type: ignore[no-untyped-call]
        self._health = Health(self._server, ["baton.v1.NodeStatus", self._side.service])
        listeners = self._note, self._sessions.deliver, *(streams.deliver for streams in self._streams)
        # Before the first turn, in which a data parallel node may take part in steps that the others take to warm up.
        warm_up = self._loop.run_engine_call(self._parts.warm_up)
        self._loop.start(self._parts.role, listeners, self._failed, self._parts.count)
        await self._end_of(asyncio.wrap_future(warm_up))
        await self._end_of(self._first_turn)  # from here on the metrics page has its counts
        await self._server.start()
        await self._health.serving()
        self._why_not = None

    async def drain(self) -> bool:
        """Refuse new work and wait for the work that is here, at most --drain-timeout. False: some is left."""
        self._why_not = "stopping"
        await self._health.stopping()
        self._loop.post(Draining())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_timeout):
                await self._until_idle()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):  # even without time to wait: there may be nothing to wait for
                return await self._is_idle()
        return False

    async def _until_idle(self) -> None:
        """Ask the role itself, again after each turn that ends idle: the state of the last turn may be older than work
        that has just arrived."""
        while True:
            self._idle.clear()
            if await self._is_idle():
                return
            with contextlib.suppress(TimeoutError):  # a turn that changes nothing is not delivered
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._idle.wait()

    async def _is_idle(self) -> bool:
        return await asyncio.wrap_future(self._loop.run_engine_call(lambda: self._parts.role.idle))

    async def stop(self) -> bool:
        """End all streams, the engine's thread and the metrics page. False: the thread did not end in time."""
        await asyncio.to_thread(self._loop.stop, GRACE_S)  # outputs so far are the last to be sent
        self._sessions.close()
        for streams in self._streams:
            await streams.close()
        await self._server.stop(GRACE_S)
        ended = await asyncio.to_thread(self._loop.stop, THREAD_STOP_S)
        await asyncio.to_thread(self._auditor.close)
        await asyncio.to_thread(self.metrics.close)
        return ended

    async def _end_of(self, stage: asyncio.Future[None]) -> None:
        """Wait for a stage of the warm-up, and raise what it raises; StartupError if the engine's thread dies or hangs
        in it."""
        ends: list[asyncio.Future[Any]] = [stage, self.failure]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not stage.done():
            raise StartupError(f"warm-up: {self.failure.result()}")
        await stage

    def _bind(self, listen: HostPort, trust: Trust) -> int:
        try:
            return bind(self._server, str(listen), trust.tls)
        except RuntimeError:
            raise StartupError(f"--listen: cannot listen on {listen} (address in use, or not this machine's)") from None

    def _serve_metrics(self, registry: CollectorRegistry) -> MetricsServer:
        listen = self._settings.metrics_listen
        try:
            checks = {"/health": lambda: self._why_not}
            actions = {"/debug/profile": self._profiling.answer}
            return MetricsServer(listen, registry, checks, admin_pages(self._auditor), self._gate, actions)
        except OSError as error:
            raise StartupError(f"--metrics-port: cannot listen on {listen}: {error.strerror}") from None

    def _note(self, turn: Turn) -> None:
        if turn.idle:
            self._idle.set()
        else:
            self._idle.clear()
        if turn.counts is not None:
            counts = turn.counts
            self._metrics.set_counts(counts.blocks, counts.num_preemptions, counts.num_damaged_pieces)
            if counts.steps is not None:
                self._metrics.set_steps(counts.steps.seconds, counts.steps.num_steps, counts.steps.num_tokens)
        if not self._first_turn.done():
            self._first_turn.set_result(None)

    def _failed(self, error: BaseException) -> None:
        self._why_not = f"the engine failed: {error}"
        if not self.failure.done():
            self.failure.set_result(error)

    def _take_audit(self) -> KvAudit:
        """On the engine's thread."""
        return dataclasses.replace(self._parts.role.audit(self._loop.clock()), node_id=self._parts.info.node_id)
