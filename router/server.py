"""A router put together: state machine, links to the nodes, HTTP and gRPC front ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Iterator

import grpc.aio
import uvicorn
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton.address import HostPort
from baton.channels import SERVER_OPTIONS
from baton.errors import NodeUnavailable
from baton.settings import flag_name
from baton.telemetry import RouterMetrics, new_registry
from baton.v1 import generation_pb2
from router.accounts import Accounts
from router.admission import Admission
from router.cluster import Cluster
from router.core import RouterCore
from router.dispatcher import Dispatcher
from router.grpc_service import GenerationService
from router.http.app import create_app
from router.http.generate import GenerateRoutes, HttpLimits
from router.http.status import StatusRoutes
from router.models import Models
from router.service import Service
from router.settings import RouterSettings

log = logging.getLogger(__name__)

EPOCH_BITS = 63
_SERVICES = (generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name,)
_IDLE_S = 75
"""For connections without a request: longer than most clients keep theirs, so that none reuses one just closed."""
_MAX_BODIES = 32
"""So many of the largest bodies may be coming in at once."""
_CLOSE_S = 1.0
"""For connections to end after their requests have."""


class StartError(Exception):
    """The router cannot start; the text is one line that names the flag."""


class RouterServer:
    """`start`, then serve on the event loop until `stop`. `http_address` and `grpc_address` are known after `start`."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        registry = new_registry()
        metrics = RouterMetrics(registry)
        epoch = secrets.randbits(EPOCH_BITS)
        self.models = Models()
        accounts = Accounts(metrics, self._model_name)
        core = RouterCore(epoch, bool(settings.prefill), settings.first_token)
        self.dispatcher = Dispatcher(core, accounts)
        self.cluster = Cluster(epoch, self.dispatcher, self.models, settings.prefill, settings.decode)
        self.admission = Admission(
            settings.max_num_requests,
            settings.max_num_prompt_tokens,
            _MAX_BODIES * settings.max_body_bytes,
            on_refused=lambda error: accounts.refused(error, 0.0),
        )
        self._service = Service(
            self.dispatcher, self.models, settings.request_timeout, self.admission, settings.max_num_samples
        )
        limits = HttpLimits(settings.max_body_bytes, settings.keep_alive_interval)
        status = StatusRoutes(self.cluster, self.dispatcher, metrics, registry)
        self.app = create_app(GenerateRoutes(self._service, limits), status)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # known to grpc, not to its stubs
        self._ready = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Open both ports, then connect to the nodes in the background. Raises StartError."""
        listener = _listen(self._settings.http)
        self.http_address = HostPort(self._settings.http.host, listener.getsockname()[1])
        try:
            self.grpc_address = await self._start_grpc()
        except StartError:
            listener.close()
            raise
        self._http = _HttpServer(self._http_config())
        self._http_task = asyncio.create_task(self._http.serve(sockets=[listener]), name="http")
        await self._http_up()
        log.info("listening http=%s grpc=%s", self.http_address, self.grpc_address)
        self.cluster.start()
        self.cluster.watch(self._readiness)

    async def stop(self, hurry: asyncio.Event) -> None:
        """Take no more requests, give those that run `drain_timeout` seconds or until `hurry`, then end everything."""
        timeout_s = self._settings.drain_timeout
        self.cluster.drain()
        self._http.should_exit = True
        ending = [self._http_task, asyncio.create_task(self._grpc.stop(timeout_s + _CLOSE_S))]
        waits = [asyncio.create_task(self.dispatcher.drained()), asyncio.create_task(hurry.wait())]
        done, _ = await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if waits[0] not in done:
            log.warning("requests still running are cancelled")
        for wait in waits:
            wait.cancel()
        self.dispatcher.close()
        self._service.close()
        await asyncio.gather(*ending)
        await self.cluster.close()

    async def ended(self) -> None:
        """Returns, or raises, when the HTTP server ends by itself: without `stop`, that is our own mistake."""
        await asyncio.shield(self._http_task)

    def why_not_ready(self) -> str | None:
        return self.cluster.why_not_ready()

    def _model_name(self) -> str:
        try:
            return self.models.get(None).name
        except NodeUnavailable:
            return ""

    async def _http_up(self) -> None:
        up = asyncio.create_task(self._http.up.wait())
        await asyncio.wait((up, self._http_task), return_when=asyncio.FIRST_COMPLETED)
        if not up.done():
            up.cancel()
            await self._http_task

    async def _start_grpc(self) -> HostPort:
        self._grpc = grpc.aio.server(
            options=[*SERVER_OPTIONS, ("grpc.max_receive_message_length", self._settings.max_body_bytes)]
        )
        self._grpc.add_generic_rpc_handlers((GenerationService(self._service).handlers(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        names = (*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._grpc)
        address = self._settings.grpc
        try:
            port = self._grpc.add_insecure_port(str(address))
        except RuntimeError as error:
            raise StartError(f"{flag_name('grpc')}: {address} cannot be had: it is in use, or not ours") from error
        await self._set_health(False)
        await self._grpc.start()
        return HostPort(address.host, port)

    def _http_config(self) -> uvicorn.Config:
        return uvicorn.Config(
            self.app,
            lifespan="off",
            log_config=None,
            log_level=logging.WARNING,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_IDLE_S,
            timeout_graceful_shutdown=int(self._settings.drain_timeout + _CLOSE_S) + 1,
        )

    def _readiness(self, ready: bool) -> None:
        """The cluster's watcher."""
        if ready is self._ready:
            return
        self._ready = ready
        if ready:
            log.info("ready http://%s grpc=%s", self.http_address, self.grpc_address)
        task = asyncio.create_task(self._set_health(ready))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _set_health(self, ready: bool) -> None:
        status = health_pb2.HealthCheckResponse
        for name in ("", *_SERVICES):
            await self._health.set(name, status.SERVING if ready else status.NOT_SERVING)


class _HttpServer(uvicorn.Server):
    """Uvicorn without its signal handlers: the process has its own. `up` is set once connections are taken."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(address: HostPort) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server((address.host, address.port), family=family, backlog=2048)
    except OSError as error:
        raise StartError(f"{flag_name('http')}: {address} cannot be had: {error.strerror or error}") from error
