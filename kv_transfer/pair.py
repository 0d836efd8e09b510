"""Transports that need a word before the bytes: NIXL writes where it was told, NCCL in the order that both ends keep.

    prefill node                                             decode node
                                                             expect(peer, tag, slot)
                             <---- GRANT tag, where ----
    push(peer, tag, slot)
                              ---- BEGIN tag ---------->
                             ==== bytes, by a `Carrier` ====>
    Sent                      ---- END tag ------------>     Arrived

The words go over TCP, a connection for each direction, dialled by who pushes. A connection belongs to one life of both
processes, so its end is how a peer's death is noticed, at once; a peer that hangs is noticed by nobody, and is for
heartbeats and deadlines to end.

**When is a slot untouched?** A slot that was granted, or is being read, gets other memory when its operation is cut off
(`Staging.renew`). The old memory may serve again when nothing is under way with it at either end: the pusher closes its
connection only then, and a receiver hangs up and waits for that. A late write lands in memory that nobody reads.
"""

from __future__ import annotations

import atexit
import logging
import socket
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from baton.errors import TransferError
from kv_transfer.carrier import Carrier
from kv_transfer.host import boot_id, hosts_of
from kv_transfer.pair_address import PairAddress
from kv_transfer.pair_thread import PairThread
from kv_transfer.staging import Staging
from kv_transfer.transport import CONNECT_S, PeerLost, TransportEvent

log = logging.getLogger(__name__)

_CLOSE_S = 10.0


class PairTransport:
    """A `Transport` over a carrier, on a thread of its own. The staging outlives it.

    interface: the network interface of the words; None, or an RDMA device: all of this machine. Raises TransferError
    when there is no such interface, or the carrier cannot start.
    """

    def __init__(
        self, staging: Staging, wake: Callable[[], None], carrier: Carrier, interface: str | None = None
    ) -> None:
        self.wake = wake
        self._events: list[TransportEvent] = []
        self._events_lock = threading.Lock()
        hosts = hosts_of(interface)
        listener = _listen()
        port = listener.getsockname()[1]
        self._here = PairAddress(uuid.uuid4().hex, carrier.kind, carrier.version, boot_id(), hosts, port)
        self._info = self._here.pack()
        self._thread = PairThread(staging, carrier, self._here, listener, self._emit, wake)
        self._thread.start()
        atexit.register(self.close)  # native libraries must not be torn down under a running thread

    def info(self) -> bytes:
        return self._info

    def connect(self, peer: str, address: bytes, timeout_s: float = CONNECT_S) -> None:
        theirs = PairAddress.unpack(address, peer)
        theirs.require_like(self._here, peer)
        up: Future[None] = Future()
        self._thread.call(partial(self._connect, peer, address, theirs, up))
        try:
            up.result(timeout_s)
        except TimeoutError:
            self._thread.call(partial(self._give_up, peer, up))
            raise TransferError(f"{peer} cannot be reached within {timeout_s:g} s") from None

    def push(self, peer: str, tag: int, slot: int, num_bytes: int) -> None:
        self._thread.call(partial(self._thread.push, peer, tag, slot, num_bytes))

    def expect(self, peer: str, tag: int, slot: int, num_bytes: int) -> None:
        self._thread.call(partial(self._thread.expect, peer, tag, slot, num_bytes))

    def poll(self) -> list[TransportEvent]:
        with self._events_lock:
            events, self._events = self._events, []
        return events

    def disconnect(self, peer: str) -> None:
        self._thread.call(partial(self._thread.disconnect, peer))

    def close(self) -> None:
        atexit.unregister(self.close)
        if not self._thread.stop(_CLOSE_S):
            log.error("transport thread did not end timeout_s=%g", _CLOSE_S)

    def _emit(self, event: TransportEvent) -> None:
        with self._events_lock:
            self._events.append(event)

    def _connect(self, peer: str, address: bytes, theirs: PairAddress, up: Future[None]) -> None:
        """An end of an earlier connection that nobody has heard of yet is not this one's."""
        with self._events_lock:
            self._events = [e for e in self._events if not (isinstance(e, PeerLost) and e.peer == peer)]
        self._thread.connect(peer, address, theirs, up)

    def _give_up(self, peer: str, up: Future[None]) -> None:
        if not up.done():
            self._thread.disconnect(peer)


def _listen() -> socket.socket:
    """On all addresses, at a port that is free: what is not meant for this process is hung up on."""
    both = socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            ("", 0), family=socket.AF_INET6 if both else socket.AF_INET, backlog=128, dualstack_ipv6=both
        )
    except OSError as error:
        raise TransferError(f"no port to listen on: {error}") from None
