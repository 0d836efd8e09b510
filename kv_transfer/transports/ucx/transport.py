"""The transport over UCX: TCP, NVLink, InfiniBand, or shared memory when asked for.

Found by experiment with ucxx 0.52 and UCX 1.21, November 2026:

**When is a slot no longer accessed?** Host memory is sent with UCX_RNDV_SCHEME=am: only this process reads and writes
the bytes, within `progress` of this one thread, and never after the request has completed natively, since fragments for
a completed request are dropped. Tested with 64 to 512 MiB cut off half-way by either side, over TCP and shared memory,
while the other side kept sending, rewrote its buffer, was stopped and continued, or was killed. So host memory is
always sent this way; it is as fast as UCX's own choice. (With `get_zcopy` or `put_zcopy` the request of a killed peer
never completed.) Over NVLink or RDMA one side accesses the other's memory directly, and native completion, or a message
to oneself, says nothing about the other side. So a slot whose operation failed always gets other memory
(`Staging.renew`): late bytes land in memory that nothing reads, and a late read finds the old bytes.

**Endpoints are not closed in mid-send**, but parked: see `Link` in `thread.py`.

**A header is a message of its own**, from host memory, small enough to be eager, sent ahead of its part's bytes. UCX
matches by tag alone, regardless of the endpoint, and a message whose receive was abandoned stays in the worker; since
no tag is used twice, it never matches another part.

**Shared memory is off unless UCX_TLS names it**, which is UCX's own default where errors must be handled. All senders
share one queue into a process; one that is killed while writing there blocks it permanently for all of them (5 of 20
kills in mid-message), and one that is stopped blocks it meanwhile. TCP within a machine moves 1 GB/s and more.

**A new endpoint may be paired with a stale one.** UCX seems to pair the n-th endpoint of one side with the n-th of the
other. If only the peer had opened and closed one, as after a hang, the new endpoint here fails with "Connection reset
by remote peer", up to 0.8 s later; each retry uses the next one. Without retries two nodes were out of step for 8 s and
14 connections, each of them a failed handoff. So `connect` retries.

**How is a dead peer detected?** Over TCP its death is noticed at once; over shared memory within the keepalive interval
after its parent has reaped it, and a disconnect not at all. A hung peer is never noticed: heartbeats and deadlines must
detect it, and call `disconnect`.

**Keepalive is frequent**, since it is what finds a stale endpoint: with UCX's own 20 s, connecting takes half a minute
then. It has a price: a check of a peer that has just closed its endpoint connects anew ("connect(...) failed:
Connection refused": one of 35 closes with an interval of 1 ms, none without keepalive). A process that had said so
ended with "stubs.c:107 Assertion `0' failed", once in some hundred runs of the tests; 4,500 such closes did not repeat
it. Over TCP, both endpoints of a pair share a socket, and one that is closed leaves it open for the other: only a
check, which the peer answers over a new connection, shows that it is gone. So endpoints that never pair (each to the
peer's address with another uuid, which UCX pairs by) do not do without keepalive either: they connect at once and are
never stale, but the peer's ends of them belong to UCX, and each that was closed left a descriptor open at both ends.

Not fork-safe: neither this process nor its children may use UCX after a fork; start processes by spawn or exec.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from baton.errors import TransferError
from kv_transfer.events import EventQueue
from kv_transfer.staging import Staging
from kv_transfer.transport import CONNECT_S
from kv_transfer.transports.host import LOOPBACK, boot_id, net_devices
from kv_transfer.transports.threaded import ThreadedTransport
from kv_transfer.transports.ucx.address import Version, pack_address, unpack_address
from kv_transfer.transports.ucx.form import is_worker_address
from kv_transfer.transports.ucx.path import SHARED_MEMORY

if TYPE_CHECKING:
    from kv_transfer.transports.ucx.thread import UcxThread

log = logging.getLogger(__name__)

_TRIES = 6
_STALE = "Connection reset by remote peer"

_KEEPALIVE = "500ms"  # UCX's default is 20 s
_HOOK_GRACE = "5ms"
"""How long UCX, when it hooks a function such as mmap, waits for threads to leave the function's first bytes. UCX 1.21
raised it from 5 to 50 ms, for threads that do nothing but call mmap. With eight such functions, and up to fifteen of
CUDA, loading takes 0.4 s or more instead of 0.04 (openucx/ucx#11211). The threads here sleep meanwhile."""


class UcxTransport(ThreadedTransport):
    """A `Transport` over UCX, on a thread of its own. The staging must outlive it.

    interface, host: select its devices (`net_devices`). Raises TransferError when UCX cannot be used.

    UCX accepts any process that connects to its port, and uses any worker address that it is given: the checksum is no
    signature, and the structure (`form`) is easy to imitate. So accept addresses only from authenticated peers.
    """

    def __init__(
        self, staging: Staging, wake: Callable[[], None], interface: str | None = None, host: str = LOOPBACK
    ) -> None:
        super().__init__(wake)
        devices = net_devices(host, interface)
        thread, self._version = _load(staging, _options(staging, devices), interface, self._events)
        self._machine = boot_id()
        own = thread.start()
        self._knows_form = is_worker_address(own)
        if not self._knows_form:
            log.warning("addresses of peers are not looked at: UCX gives its own in a form that is not known here")
        self._begin(thread, pack_address(self._version, self._machine, own))

    def connect(self, peer: str, address: bytes, timeout_s: float = CONNECT_S) -> None:
        worker_address, same_host = unpack_address(self._version, self._machine, address, peer)
        if self._knows_form and not is_worker_address(worker_address):
            raise TransferError(f"what {peer} sent is no address of a UCX worker")
        deadline = time.monotonic() + timeout_s
        for tries_left in reversed(range(_TRIES)):
            try:
                self._connect(peer, deadline - time.monotonic(), worker_address, same_host)
            except TransferError as error:
                if _STALE in error.message and tries_left:
                    continue
                raise
            return


def _options(staging: Staging, devices: str | None) -> dict[str, str]:
    """Options for UCX; except for RNDV_SCHEME and `devices`, UCX_... variables set by the operator take precedence."""
    options = {"KEEPALIVE_INTERVAL": _KEEPALIVE}
    if SHARED_MEMORY & set(os.environ.get("UCX_TLS", "").split(",")):
        options["MM_ERROR_HANDLING"] = "y"
    options = {name: value for name, value in options.items() if f"UCX_{name}" not in os.environ}
    if staging.device.type == "cpu":
        options["RNDV_SCHEME"] = "am"
    if devices is not None:
        options["NET_DEVICES"] = devices
    return options


def _load(
    staging: Staging,
    options: dict[str, str],
    interface: str | None,
    events: EventQueue,
) -> tuple[UcxThread, Version]:
    """Load the native library with the first transport, since it must not be loaded before a fork."""
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")  # ucxx itself sets some that go unused
    os.environ.setdefault("UCX_MEM_BISTRO_GRACE_DURATION", _HOOK_GRACE)
    try:
        import ucxx

        from kv_transfer.transports.ucx.thread import UcxThread
    except (ImportError, OSError) as error:
        raise TransferError(f"UCX cannot be loaded: {error}") from None
    return UcxThread(staging, options, interface, events), ucxx.get_ucx_version()
