"""Whether a router is ready to answer requests, and if not, why."""

from __future__ import annotations

import http.client
import json

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.address import HostPort
from baton.rpc.channels import CLUSTER_CHANNEL_OPTIONS

RECONNECT_MS = 100
WHOLE_CLUSTER = "baton.v1.Cluster"
"""The name under which the router's health service reports whether all kinds of nodes are there."""
ASK_TIMEOUT_S = 5.0


async def wait_until_serving(grpc_address: HostPort) -> None:
    """Wait until the router reports that requests will be answered and nothing is missing, without polling or a
    deadline.

    Also waits for a router that is not up yet, or that dies meanwhile.
    """
    options = [
        *CLUSTER_CHANNEL_OPTIONS,
        ("grpc.initial_reconnect_backoff_ms", RECONNECT_MS),
        ("grpc.min_reconnect_backoff_ms", RECONNECT_MS),
        ("grpc.max_reconnect_backoff_ms", RECONNECT_MS),
    ]
    async with grpc.aio.insecure_channel(str(grpc_address), options=options) as channel:
        stub, question = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest(service=WHOLE_CLUSTER)
        while True:
            try:
                async for answer in stub.Watch(question, wait_for_ready=True):
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise


def why_not_ready(http_address: HostPort) -> str | None:
    """The reason, as the router states it. None: it is ready, and nothing is missing."""
    connection = http.client.HTTPConnection(http_address.host, http_address.port, timeout=ASK_TIMEOUT_S)
    try:
        connection.request("GET", "/ready")
        answer = connection.getresponse()
        body = answer.read()
        said = json.loads(body)
        if answer.status != http.client.OK:
            return str(said["error"]["message"])
        return None if said["status"] == "ready" else str(said["status"])
    except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
        return f"the router gives no answer at {http_address}: {error}"
    finally:
        connection.close()
