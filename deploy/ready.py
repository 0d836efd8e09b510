"""Whether a router answers requests, and why not."""

from __future__ import annotations

import http.client
import json

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.address import HostPort
from baton.channels import CHANNEL_OPTIONS

RECONNECT_MS = 100
ASK_TIMEOUT_S = 5.0


async def wait_until_serving(grpc_address: HostPort) -> None:
    """Until the router says that requests will be answered: it tells, nobody asks again and again. Sets no deadline.

    A router that is not up yet, or that dies meanwhile, is waited for.
    """
    options = [
        *CHANNEL_OPTIONS,
        ("grpc.initial_reconnect_backoff_ms", RECONNECT_MS),
        ("grpc.min_reconnect_backoff_ms", RECONNECT_MS),
        ("grpc.max_reconnect_backoff_ms", RECONNECT_MS),
    ]
    async with grpc.aio.insecure_channel(str(grpc_address), options=options) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            try:
                async for answer in stub.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True):
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise


def why_not_ready(http_address: HostPort) -> str | None:
    """The router's own words. None: it is ready."""
    connection = http.client.HTTPConnection(http_address.host, http_address.port, timeout=ASK_TIMEOUT_S)
    try:
        connection.request("GET", "/ready")
        answer = connection.getresponse()
        body = answer.read()
        return None if answer.status == http.client.OK else str(json.loads(body)["error"]["message"])
    except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
        return f"the router gives no answer at {http_address}: {error}"
    finally:
        connection.close()
