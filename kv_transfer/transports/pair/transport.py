"""Transports that need a word before the bytes: CUDA IPC and NIXL write where they were told, NCCL in the order that
both ends keep.

    prefill node                                             decode node
                                                             expect(peer, tag, slot)
                             <---- GRANT tag, where ----
    push(peer, tag, slot)
                              ---- BEGIN tag ---------->
                             ==== bytes, by a `Carrier` ====>
    Sent                      ---- END tag ------------>     Arrived

Where the carrier reaches the other's memory, the mover may store the bytes there itself after GRANT
(`acquire_remote_slot`): `push` comes with what stores them, BEGIN goes at once, and END when that is over. The last
store may signal (`Target.signal`): after BEGIN and the signal all is there, and END says nothing new.

The words go over TCP, a connection for each direction, dialled by who pushes. A connection belongs to one life of both
processes, so its end is how a peer's death is noticed, at once; a peer that hangs is noticed by nobody, and is for
heartbeats and deadlines to end.

**When is a slot untouched?** A slot that was granted, or is being read, gets other memory when its operation is cut off
(`Staging.renew`). STRAY says of a grant, before BYE, that its slot is stored to though no message will come of that.
The old memory may serve again when nothing is under way with it at either end: the pusher closes its connection only
then, and a receiver hangs up and waits for that. A late write lands in memory that nobody reads.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable

from baton.cluster_secret import ClusterSecret
from kv_transfer.staging import Staging
from kv_transfer.transport import CONNECT_S
from kv_transfer.transports.host import LOOPBACK, address_of, boot_id, hosts_of, listen_on
from kv_transfer.transports.pair.address import PairAddress
from kv_transfer.transports.pair.carrier import Carrier
from kv_transfer.transports.pair.thread import PairThread
from kv_transfer.transports.threaded import ThreadedTransport


class PairTransport(ThreadedTransport):
    """A `Transport` over a carrier, on a thread of its own. The staging outlives it.

    host: where the words are taken, which "0.0.0.0" and "::" are all addresses of this machine; interface: the network
    interface that they go over instead, unless it is an RDMA device. secret: what both ends of a connection must prove
    to know. Raises TransferError when there is no such interface or address, or the carrier cannot start.
    """

    def __init__(
        self,
        staging: Staging,
        wake: Callable[[], None],
        carrier: Carrier,
        interface: str | None = None,
        host: str = LOOPBACK,
        secret: ClusterSecret | None = None,
    ) -> None:
        super().__init__(wake)
        hosts, address = hosts_of(interface), address_of(host, interface)
        listener = listen_on(address)
        port = listener.getsockname()[1]
        self._here = PairAddress(
            uuid.uuid4().hex,
            carrier.kind,
            carrier.version,
            boot_id(),
            hosts if address is None else (address,),
            port,
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
