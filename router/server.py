"""Puts a router together: state machine, links to the nodes, HTTP and gRPC front ends."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable

from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from baton.address import HostPort
from baton.errors import NodeUnavailable
from baton.process.listening import listen_socket
from baton.settings import flag_name
from baton.telemetry import ROUTER, RouterMetrics, new_registry
from baton.telemetry.timeline_ring import TimelineRing
from router.discovery.source import Member
from router.grpc.server import GrpcLimits, GrpcServer
from router.grpc.service import GenerationService
from router.http.admin import AdminRoutes
from router.http.anthropic.routes import MessagesRoutes
from router.http.app import create_app
from router.http.body import BodyReader
from router.http.chat_websocket import PATHS as CHATS
from router.http.chat_websocket import ChatWebSocket
from router.http.console.snapshot import Snapshot
from router.http.debug_requests import DebugRequests
from router.http.generate import GenerateRoutes
from router.http.limits import Bodies, ConnectionLimits, HttpLimits, WebSockets
from router.http.responses_api.routes import PATH as RESPONSES
from router.http.responses_api.routes import ResponsesRoutes
from router.http.responses_api.store import ResponseStore
from router.http.responses_api.websocket import ResponsesWebSocket
from router.http.server import HttpServer
from router.http.sglang.routes import SglangRoutes
from router.http.status import StatusRoutes
from router.http.tokenizer_info import TokenizerInfoRoutes
from router.http.tokens.routes import TokensRoutes
from router.nodes.cluster import Cluster, Readiness
from router.nodes.dispatcher import Dispatcher
from router.nodes.links import NodeLink
from router.request_metrics import RequestMetrics
from router.requests.admission import Admission
from router.requests.core import RouterCore
from router.service import Service
from router.settings import RouterSettings
from router.startup import (
    StartError,
    make_admin_keys,
    make_edge,
    make_membership,
    make_parsers,
    make_policy,
    make_span_sender,
)
from router.text.models import Models
from router.workers.siblings import Siblings, WorkerContext

log = logging.getLogger(__name__)

EPOCH_BITS = 63
_CLOSE_S = 1.0
"""How long connections have to end after their requests."""


class RouterServer:
    """`start`, then serve on the event loop until `stop`. `http_address` and `grpc_address` are known after `start`.

    `shared`: it is one of several workers. Raises StartError at construction for files that cannot be used.
    """

    def __init__(self, settings: RouterSettings, shared: WorkerContext | None = None) -> None:
        self._settings = settings
        self._shared = shared
        self._http_wanted, self._grpc_wanted = (shared.http, shared.grpc) if shared else (settings.http, settings.grpc)
        self._edge = make_edge(settings)
        registry = new_registry(ROUTER)
        metrics = self._metrics = RouterMetrics(registry)
        epoch = secrets.randbits(EPOCH_BITS)
        timelines = TimelineRing(settings.max_timeline_bytes)
        self._spans = make_span_sender(settings)
        send = self._spans.send if self._spans is not None else None
        request_metrics = RequestMetrics(metrics, self._model_name, timelines, send)
        self.core = _make_core(settings, epoch)
        self.dispatcher = Dispatcher(self.core, request_metrics)
        self.models = Models(self.core.pool.shares)
        self.cluster = self._make_cluster(epoch)
        self.admission = Admission(
            settings.max_num_requests,
            settings.max_num_prompt_tokens,
            on_refused=request_metrics.refused,
        )
        self._service = Service(
            self.dispatcher,
            self.models,
            settings.request_timeout,
            self.admission,
            settings.max_num_samples,
            settings.timings,
            settings.trust_request_chat_template,
            settings.default_chat_template_kwargs,
        )
        status = self._make_status(metrics, registry, timelines)
        self._siblings = status.siblings
        bodies = Bodies(settings.max_body_bytes, settings.max_buffered_body_bytes, request_metrics.refused)
        self.app = self._make_app(bodies, status)
        paths = (RESPONSES, *CHATS)
        self._websockets = WebSockets(frozenset((*paths, *[settings.root_path + path for path in paths])), bodies)
        self._told: Readiness | None = None

    def _make_cluster(self, epoch: int) -> Cluster:
        settings, trust = self._settings, self._settings.trust()

        def connect(member: Member, changed: Callable[[], None]) -> NodeLink:
            address, role, name = member.address, member.role, member.name
            silence_s = settings.silence_timeout
            return NodeLink(address, role, epoch, self.dispatcher, self.models, changed, trust, silence_s, name)

        membership = make_membership(settings)
        return Cluster(connect, self.core.pool, self.models, membership, settings.request_timeout)

    def _make_status(
        self, metrics: RouterMetrics, registry: CollectorRegistry, timelines: TimelineRing
    ) -> StatusRoutes:
        siblings = Siblings(self._shared.place if self._shared else None)
        return StatusRoutes(
            self.cluster,
            self.core,
            metrics,
            registry,
            self.admission,
            siblings,
            DebugRequests(timelines, self.core.requests, siblings),
            Snapshot(self.cluster, self.core, metrics, self.models, self._settings.has_admin_keys, siblings),
        )

    def _make_app(self, bodies: Bodies, status: StatusRoutes) -> ASGIApp:
        """The routes, those of each API over the same service."""
        settings = self._settings
        limits = HttpLimits(bodies, settings.keep_alive_interval, settings.websocket_idle_timeout)
        parsers = make_parsers(settings)
        generate = GenerateRoutes(self._service, limits, parsers, settings.enable_force_include_usage)
        store = ResponseStore(settings.num_stored_responses, settings.max_stored_response_bytes)
        responses = ResponsesRoutes(self._service, limits, generate, store)
        websockets = (
            ResponsesWebSocket(responses, limits, self._service.offload).routes,
            ChatWebSocket(generate, limits, self._service).routes,
        )
        admin_bodies = BodyReader(bodies, self._service.offload)
        return create_app(
            generate,
            MessagesRoutes(self._service, limits, parsers),
            responses,
            TokensRoutes(self._service, limits, generate),
            SglangRoutes(self._service, limits),
            websockets,
            TokenizerInfoRoutes(self._service, settings.enable_tokenizer_info_endpoint),
            status,
            AdminRoutes(self.cluster, admin_bodies, make_admin_keys(settings)),
            self._edge.access,
            self._spans is not None,
            settings.console,
            settings.root_path,
        )

    async def start(self) -> None:
        """Open both ports, then connect to the nodes in the background. Raises StartError."""
        for warning in self._settings.warnings(listen=None):
            log.warning(warning)
        listener = _listen("http", self._http_wanted, self._shared is not None)
        self.http_address = HostPort(self._http_wanted.host, listener.getsockname()[1])
        try:
            self.grpc_address = await self._start_grpc()
        except StartError:
            listener.close()
            raise
        drain_s = self._settings.drain_timeout + _CLOSE_S
        self._http = HttpServer(
            self.app,
            self._edge.limits,
            self._edge.tls,
            drain_s,
            self._websockets,
            self._metrics.refused_connections.inc,
        )
        self._http_task = asyncio.create_task(self._http.serve(sockets=[listener]), name="http")
        await self._http_up()
        await self._start_siblings()
        log.info(
            "listening %s=%s grpc=%s max_connections=%d",
            self._scheme,
            self.http_address,
            self.grpc_address,
            self._edge.limits.max_connections,
        )
        self.cluster.start()
        self.cluster.watch(self._readiness)

    async def stop(self, hurry: asyncio.Event) -> None:
        """Take no more requests, let running ones finish for `drain_timeout` seconds or until `hurry`, then end all."""
        timeout_s = self._settings.drain_timeout
        self.cluster.drain()
        self._http.stop()
        ending = asyncio.gather(self._http_task, self._grpc.stop(timeout_s + _CLOSE_S))
        hurrying = asyncio.create_task(hurry.wait())
        # not for the dispatcher: it does not know of requests yet whose body still comes, or is tokenized
        await asyncio.wait((ending, hurrying), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        hurrying.cancel()
        if self.admission.num_requests:
            log.warning("requests still running are cancelled")
        self.dispatcher.close()
        await ending
        self._service.close()
        self._siblings.close()
        await self.cluster.close()
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)

    async def ended(self) -> None:
        """Returns, or raises, when the HTTP server ends by itself: without `stop`, that is internal error."""
        await asyncio.shield(self._http_task)

    @property
    def limits(self) -> ConnectionLimits:
        """Of HTTP connections."""
        return self._edge.limits

    @property
    def _scheme(self) -> str:
        return "http" if self._edge.tls is None else "https"

    def _model_name(self) -> str:
        """Of a request that came to no model."""
        try:
            return self.models.served()[0].name
        except NodeUnavailable:
            return ""

    async def _http_up(self) -> None:
        up = asyncio.create_task(self._http.up.wait())
        await asyncio.wait((up, self._http_task), return_when=asyncio.FIRST_COMPLETED)
        if not up.done():
            up.cancel()
            await self._http_task

    async def _start_siblings(self) -> None:
        try:
            await self._siblings.start()
        except OSError as error:  # no room in the folder for temporary files, for one
            raise StartError(f"--workers: no socket for what they tell each other: {error.strerror}") from error

    async def _start_grpc(self) -> HostPort:
        settings, edge = self._settings, self._edge
        limits = GrpcLimits(
            edge.limits,
            settings.max_body_bytes,
            settings.max_num_requests,
            settings.request_timeout,
            self._shared is not None,
        )
        traces = self._spans is not None
        service = GenerationService(self._service, edge.keys, settings.write_timeout, traces)
        self._grpc = GrpcServer(service, limits, edge.keys)
        address = self._grpc_wanted
        if self._shared is None:  # else it would take connections from other workers for a moment
            _listen("grpc", address, shared=False).close()  # gRPC does not tell why it cannot
        try:
            return await self._grpc.start(address, edge.credentials)
        except RuntimeError as error:
            raise StartError(f"{flag_name('grpc')}: {address} cannot be had: it is in use, or not ours") from error

    def _readiness(self, readiness: Readiness) -> None:
        """The cluster's watcher."""
        if readiness == self._told:
            return
        if readiness.ready and not (self._told and self._told.ready):
            log.info("%s %s://%s grpc=%s", readiness.status, self._scheme, self.http_address, self.grpc_address)
        self._told = readiness
        self._grpc.set_health(readiness)


def _make_core(settings: RouterSettings, epoch: int) -> RouterCore:
    return RouterCore(
        epoch,
        bool(settings.prefill),
        settings.first_token,
        settings.max_waiting,
        make_policy(settings),
        migrate_above=settings.migrate_above,
        max_waiting_tokens=settings.max_waiting_tokens,
    )


def _listen(name: str, address: HostPort, shared: bool) -> socket.socket:
    try:
        return listen_socket(address, backlog=2048, reuse_port=shared)
    except OSError as error:
        raise StartError(f"{flag_name(name)}: {address} cannot be had: {error.strerror or error}") from error
