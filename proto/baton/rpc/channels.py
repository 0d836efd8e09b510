"""gRPC options of all channels and servers of baton, and the channels between roles.

Both sides must set keepalive: otherwise a server rejects frequent pings with `too_many_pings` and closes the
connection. A host that vanishes silently is detected after `KEEPALIVE_TIME_MS + KEEPALIVE_TIMEOUT_MS`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from baton.renewed import Renewed

KEEPALIVE_TIME_MS = 5_000
KEEPALIVE_TIMEOUT_MS = 5_000
MAX_MESSAGE_BYTES = 256 * 1024 * 1024
"""Far above any of our messages (a prompt of a million tokens takes 4 MB), unlike gRPC's default of 4 MB."""

_COMMON: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    *_COMMON,
    # a new channel must not inherit the back-off of an earlier one to the same address
    ("grpc.use_local_subchannel_pool", 1),
]

CLUSTER_CHANNEL_OPTIONS: list[tuple[str, int]] = [
    *CHANNEL_OPTIONS,
    # many set `http_proxy` for the outside and no `no_proxy`: gRPC would ask that proxy even for 127.0.0.1
    ("grpc.enable_http_proxy", 0),
]
"""Between the processes of a cluster."""

SERVER_OPTIONS: list[tuple[str, int]] = [
    *_COMMON,
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
    # a connection that is not even HTTP/2, or makes no call, takes the place of one that would: peers call at once
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 10_000),
    # with port reuse, two servers on one port would silently get half of the calls each
    ("grpc.so_reuseport", 0),
]

_MAX_CONNECTIONS = 4_096
"""To a node: one for each process of a router, and for each node of the other role."""


def node_server_options(open_files: int) -> list[tuple[str, int]]:
    """`open_files`: the process's limit. Half of it is for other purposes than connections, whoever opens them: what
    libraries cannot open may end the process without a word. Connections beyond are closed at once."""
    return [
        *SERVER_OPTIONS,
        # a peer has one stream, and a few short calls before it
        ("grpc.max_concurrent_streams", 128),
        ("grpc.max_allowed_incoming_connections", min(open_files // 2, _MAX_CONNECTIONS)),
    ]


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM texts. Between roles the certificate is presented as a server and as a client, must name the address that
    peers connect to, and must be signed by one of `authorities`, as must the peer's."""

    key: bytes = field(repr=False)
    certificate: bytes
    authorities: bytes | None


def open_channel(address: str, tls: Renewed[Tls] | None, name: str = "") -> grpc.aio.Channel:
    """A channel to another role. `name`: what the peer's certificate must name in place of the address."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=CLUSTER_CHANNEL_OPTIONS)
    own = tls.current()
    credentials = grpc.ssl_channel_credentials(own.authorities, own.key, own.certificate)
    named = [("grpc.ssl_target_name_override", name)] if name else []
    return grpc.aio.secure_channel(address, credentials, options=[*CLUSTER_CHANNEL_OPTIONS, *named])


def server_credentials(tls: Renewed[Tls], needs_certificate: bool) -> grpc.ServerCredentials:
    """Of a server that takes the current files at each handshake. needs_certificate: clients must present one that is
    signed by the authorities."""
    used = tls.current()

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        """On a thread of gRPC's. None: as before."""
        nonlocal used
        if (found := tls.current()) is used:
            return None
        used = found
        return _configuration(found)

    fetch: Any = renewed  # the types of grpc know nothing of None
    return grpc.dynamic_ssl_server_credentials(_configuration(used), fetch, needs_certificate)


def _configuration(tls: Tls) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(tls.key, tls.certificate)], tls.authorities)


def bind(server: grpc.aio.Server, address: str, tls: Renewed[Tls] | None) -> int:
    """Make the server listen on `address` for other roles; returns the port. With `tls`, clients must present a
    certificate. Raises RuntimeError if the address is not available."""
    if tls is None:
        return int(server.add_insecure_port(address))
    return int(server.add_secure_port(address, server_credentials(tls, needs_certificate=True)))
