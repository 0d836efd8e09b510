"""The public gRPC port: its limits, our service, and the standard services beside it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from baton.address import HostPort
from baton.rpc.channels import SERVER_OPTIONS
from baton.rpc.single_requests import SingleRequests
from baton.v1 import generation_pb2
from router.api_keys import ApiKeys, InvalidApiKey
from router.grpc.service import GenerationService, authorization_of
from router.http.limits import ConnectionLimits
from router.nodes.cluster import Readiness

_SERVICES = (generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name,)
WHOLE_CLUSTER = "baton.v1.Cluster"
"""A name in the health service: SERVING only while the cluster is ready and not degraded."""
_ARRIVAL_S = 0.5
"""How long a router that stops waits for the requests of calls that it has taken."""
_ALIVE = f"/{health.SERVICE_NAME}/"
_MAX_AGE_S = 3600.0
_MAX_STREAMS = 65_536
_MOST = 2**31 - 1
"""gRPC's options are 32-bit numbers. As a time, this is no limit."""


@dataclass(frozen=True, slots=True)
class GrpcLimits:
    """`connections.max_connections` counts only the connections to this port. `max_requests` of 0 means no limit.
    `shares_port`: with other processes."""

    connections: ConnectionLimits
    max_message_bytes: int
    max_requests: int
    request_timeout_s: float
    shares_port: bool = False

    def options(self) -> list[tuple[str, int]]:
        """A connection is asked to close when it is idle or an hour old; running calls may end first."""
        limits = self.connections
        options: dict[str, float] = {
            **dict(SERVER_OPTIONS),
            "grpc.so_reuseport": int(self.shares_port),
            "grpc.max_receive_message_length": self.max_message_bytes,
            "grpc.max_metadata_size": limits.max_header_bytes,
            # between the two limits, calls are refused at random
            "grpc.absolute_max_metadata_size": limits.max_header_bytes,
            "grpc.max_allowed_incoming_connections": limits.max_connections,
            "grpc.max_concurrent_streams": min(self.max_requests or _MAX_STREAMS, _MAX_STREAMS) + 1,
            "grpc.server_handshake_timeout_ms": limits.header_timeout_s * 1e3,
            "grpc.max_connection_idle_ms": limits.idle_timeout_s * 1e3,
            "grpc.max_connection_age_ms": _MAX_AGE_S * 1e3,
            "grpc.max_connection_age_grace_ms": (self.request_timeout_s + limits.write_timeout_s) * 1e3,
        }
        return [(name, int(min(value, _MOST))) for name, value in options.items()]


class GrpcServer:
    """`start`, then `stop`. Serves `service`, health (not serving before `set_health`) and reflection."""

    def __init__(self, service: GenerationService, limits: GrpcLimits, keys: ApiKeys | None = None) -> None:
        self._requests = SingleRequests(limits.connections.body_timeout_s)
        interceptors = [*([_RequireKey(keys)] if keys else []), self._requests]
        self._server = grpc.aio.server(options=limits.options(), interceptors=interceptors)
        self._health = _Health()
        self._server.add_generic_rpc_handlers((service.handlers(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._reflection = _Reflection((*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME))
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(self._reflection, self._server)

    async def start(self, address: HostPort, credentials: grpc.ServerCredentials | None) -> HostPort:
        """Returns the address with its port. Raises RuntimeError when the address is not available."""
        if credentials is None:
            port = self._server.add_insecure_port(str(address))
        else:
            port = self._server.add_secure_port(str(address), credentials)
        self.set_health(Readiness("starting"))
        await self._server.start()
        return HostPort(address.host, port)

    async def stop(self, grace_s: float) -> None:
        self._health.stop()
        self._reflection.stop()
        self._requests.stop(_ARRIVAL_S)
        await self._server.stop(grace_s)

    def set_health(self, readiness: Readiness) -> None:
        whole = readiness.ready and readiness.degraded is None
        serving = {"": readiness.ready, **dict.fromkeys(_SERVICES, readiness.ready), WHOLE_CLUSTER: whole}
        self._health.set(serving)


class _Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # generated without types
    """The standard service. grpc's own would keep a server that stops waiting for those who watch: their streams end
    with the last status."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {}
        self._stopping = False
        self._changed = asyncio.Event()

    def set(self, serving: Mapping[str, bool]) -> None:
        """Whether each of these services is served."""
        status = health_pb2.HealthCheckResponse
        self._statuses |= {name: status.SERVING if serves else status.NOT_SERVING for name, serves in serving.items()}
        self._changed.set()
        self._changed = asyncio.Event()

    def stop(self) -> None:
        """Nothing is served from here on."""
        self._stopping = True
        self.set(dict.fromkeys(self._statuses, False))

    async def Check(  # noqa: N802  # its name in the protocol
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "the health service knows no such name")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        told = None
        while True:
            changed, stopping = self._changed, self._stopping
            status = self._statuses.get(request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
            if status != told:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                told = status
            if stopping:
                return
            await changed.wait()


class _Reflection(reflection.aio.ReflectionServicer):  # type: ignore[name-defined, misc]  # stubs without aio
    """The standard service, whose streams end with the server: tools such as grpcui keep theirs open."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        self._stopped.set()

    async def ServerReflectionInfo(  # noqa: N802
        self, request_iterator: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Any]:
        async for response in super().ServerReflectionInfo(self._until_stopped(request_iterator), context):
            yield response

    async def _until_stopped(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        stopped = asyncio.ensure_future(self._stopped.wait())
        try:
            while True:
                request = asyncio.ensure_future(anext(requests, None))
                await asyncio.wait((request, stopped), return_when=asyncio.FIRST_COMPLETED)
                if not request.done():
                    request.cancel()
                    return
                if request.result() is None:
                    return
                yield request.result()
        finally:
            stopped.cancel()


class _RequireKey(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """Refuses calls without a key before their message is read."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        if not handler_call_details.method.startswith(_ALIVE):
            try:
                self._keys.owner(authorization_of(handler_call_details.invocation_metadata))
            except InvalidApiKey as error:
                return _refusing(error)
        return await continuation(handler_call_details)


def _refusing(error: InvalidApiKey) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler for a stream of requests, because only such a handler runs before a message has come."""

    async def refuse(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(grpc.StatusCode[error.grpc_status], error.message)

    return grpc.stream_stream_rpc_method_handler(refuse)
