"""gRPC options that every channel and server of ours uses.

Keepalive is stated on both sides: a server that was not told refuses frequent pings with `too_many_pings` and closes
the connection. A host that vanished without a word is noticed after `KEEPALIVE_TIME_MS + KEEPALIVE_TIMEOUT_MS`.
"""

from __future__ import annotations

KEEPALIVE_TIME_MS = 5_000
KEEPALIVE_TIMEOUT_MS = 5_000
MAX_MESSAGE_BYTES = 256 * 1024 * 1024
"""Far above any message of ours (a prompt of a million tokens is 4 MB); gRPC's own default of 4 MB is not."""

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

SERVER_OPTIONS: list[tuple[str, int]] = [
    *_COMMON,
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
    # two servers on one port would each get half of the calls, in silence
    ("grpc.so_reuseport", 0),
]
