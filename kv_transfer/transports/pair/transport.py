"""Transports whose two ends agree on a message before its bytes move: CUDA IPC and NIXL write to a granted place, NCCL
sends in an order that both ends keep.

    prefill node                                             decode node
                                                             expect(peer, tag, slot)
                             <---- GRANT tag, where ----
    push(peer, tag, slot)
                              ---- BEGIN tag ---------->
                             ==== bytes, by a `Carrier` ====>
    Sent                      ---- END tag ------------>     Arrived

If the carrier can reach the peer's memory, the mover may store the bytes there itself after GRANT
(`acquire_remote_slot`): the stores are passed to `push`, BEGIN is sent at once, and END when the stores are over. The
last store may set a completion flag (`RemoteSlot.signal`): after BEGIN and the flag all bytes are there, and END is
redundant.

Control messages go over TCP, on one connection per direction, dialled by the pusher. A connection belongs to one
incarnation of both processes, so its end reveals a peer's death at once. A hung peer is never noticed: heartbeats and
deadlines must detect it.

**When is a slot no longer accessed?** A slot that was granted, or is being read, gets other memory when its operation
is cut off (`Staging.renew`). STRAY, sent before BYE, marks a granted slot that is being stored to although no message
will follow. The old memory may be reused when neither end has an operation on it: the pusher closes its connection only
then, and a receiver hangs up and waits for that. A late write lands in memory that nothing reads.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable

from baton.rpc.cluster_secret import ClusterSecret
from kv_transfer.slots import Slots
from kv_transfer.transport import CONNECT_S
from kv_transfer.transports.host import LOOPBACK, address_of, boot_id, hosts_of, listen_on
from kv_transfer.transports.pair.address import MOST_HOSTS, PairAddress
from kv_transfer.transports.pair.carrier import Carrier
from kv_transfer.transports.pair.listener import Listener
from kv_transfer.transports.pair.thread import PairThread
from kv_transfer.transports.threaded import ThreadedTransport


class PairTransport(ThreadedTransport):
    """A `Transport` over a carrier, on a thread of its own. The staging must outlive it.

    host: where to listen for control messages; "0.0.0.0" and "::" mean all addresses of this machine. interface: the
    network interface to use instead, unless it is an RDMA device. secret: both ends of a connection must prove that
    they know it. Raises TransferError when there is no such interface or address, or the carrier cannot start.
    """

    def __init__(
        self,
        staging: Slots,
        wake: Callable[[], None],
        carrier: Carrier,
        interface: str | None = None,
        host: str = LOOPBACK,
        secret: ClusterSecret | None = None,
    ) -> None:
        super().__init__(wake)
        hosts, address = hosts_of(interface), address_of(host, interface)
        listener = Listener(listen_on(address))
        self._here = PairAddress(
            uuid.uuid4().hex,
            carrier.kind,
            carrier.version,
            boot_id(),
            hosts[:MOST_HOSTS] if address is None else (address,),
            listener.port,
            carrier.memory.hex(),
        )
        thread = PairThread(staging, carrier, self._here, listener, self._events, secret)
        thread.start()
        self._pair = thread
        self._begin(thread, self._here.pack())

    def connect(self, peer: str, address: bytes, timeout_s: float = CONNECT_S) -> None:
        theirs = PairAddress.unpack(address, peer)
        theirs.require_like(self._here, peer)
        self._connect(peer, timeout_s, address, theirs)
