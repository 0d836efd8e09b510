"""The link from a rank's process to rank 0: with it the rank joins the group, receives steps, and offers its KV pool.

`ForkedRankLink`: rank 0 is on this host and forked the rank: steps and the requests that move KV arrive in shared
memory. `RemoteRankLink`: rank 0 is on another host, and they arrive over a `RankStream`.

The rank's process moves the KV of its pool itself. Rank 0 must not copy there, because two processes that use one GPU
take turns on it, each for half a millisecond or more.
"""

from __future__ import annotations

import json
import os
import queue
import struct
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from baton.address import HostPort
from kv_transfer.transports.host import LOOPBACK
from node.peers.rendezvous import RendezvousEndpoint, join_rendezvous, own_host
from node.ranks.forks import RankPipe
from node.ranks.ring import RingReader, SharedRing
from node.ranks.stream import Content, RankStream

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from engine.model.parallel.group import RankGroup
    from kv_transfer.pool_server import PoolServer

POOL_REQUEST = -1
"""The kind of a message in the ring that is not a step, but a request for a rank's KV pool."""
JOIN_S = 120.0
"""Time for all ranks to import torch, which takes as long as the machine needs."""
Serve = Callable[[Callable[..., None], Callable[[Callable[[], None]], None], Callable[[Exception], None]], "PoolServer"]
"""Makes the server of the rank's pool for rank 0, from its `send`, its `after_steps` and its `fail`."""


class RankLink(Protocol):
    """number: of the rank in its node."""

    number: int
    host: str | None
    """This host's address for the other hosts of the node; None: it has none."""

    def join(self, device: torch.device, fingerprint: Callable[[], str]) -> tuple[RankGroup, HostPort | None]:
        """Wait for the node and join the group of its ranks. Returns the group, and the address of the TCPStore of all
        data parallel nodes. device: the rank's. fingerprint: of the weights as they are served. Raises OSError or
        RuntimeError if the node has ended, StartupError if it serves other weights."""

    def ready(self, device: torch.device, serve: Serve) -> None:
        """Report that this rank, whose pool is on that device, can take steps."""

    def receive(self) -> tuple[int, NDArray[np.int32]]:
        """Wait for the next message of rank 0: its `engine.model.other_ranks.Kind` and its values."""


class ForkedRankLink:
    """Implements RankLink. reader: this rank's number among the readers of the ring."""

    host: str | None = None

    def __init__(self, number: int, size: int, pipe: RankPipe, ring: SharedRing, reader: int) -> None:
        self.number, self._size, self._pipe = number, size, pipe
        self._ring = RingReader(ring, reader)

    def join(self, device: torch.device, fingerprint: Callable[[], str]) -> tuple[RankGroup, HostPort | None]:
        message = self._pipe.receive()
        peers = HostPort(*message["peers"]) if message["peers"] else None
        store = store_at(HostPort(message["host"], message["port"]))
        return join_group(store, self.number, self._size, device, message["host"]), peers

    def ready(self, device: torch.device, serve: Serve) -> None:
        # Requests are handled between steps, on the thread that launches steps, so all earlier steps are launched by
        # then.
        self._server = serve(self._pipe.send_of_pool, lambda do: do(), self._fail)
        self._pipe.send(ready=True)

    def receive(self) -> tuple[int, NDArray[np.int32]]:
        while (message := self._ring.receive())[0] == POOL_REQUEST:
            number, request = unpack_request(message[1])
            if number == self.number:
                self._server.handle(request)
        return message

    def _fail(self, error: Exception) -> None:
        self._pipe.failed(error)
        os._exit(1)


class RemoteRankLink:
    """Implements RankLink. endpoint: where rank 0 listens."""

    host: str | None

    def __init__(self, number: int, size: int, pipe: RankPipe, endpoint: RendezvousEndpoint, join_s: float) -> None:
        self.number, self._size, self._pipe, self._endpoint, self._join_s = number, size, pipe, endpoint, join_s
        self._steps: queue.SimpleQueue[tuple[int, NDArray[np.int32]] | Callable[[], None]] = queue.SimpleQueue()

    def join(self, device: torch.device, fingerprint: Callable[[], str]) -> tuple[RankGroup, HostPort | None]:
        hello = {"rank": self.number, "serves": {"--model": fingerprint()}}
        link, answer = join_rendezvous(self._endpoint, hello, self._join_s)
        self._stream = RankStream(link.release())
        at = HostPort(self._endpoint.address.host, int(answer["port"]))
        self.host = own_host(at)
        return join_group(store_at(at), self.number, self._size, device, self.host), None

    def ready(self, device: torch.device, serve: Serve) -> None:
        server = serve(self._stream.send_message, self._steps.put, self._fail)
        threading.Thread(target=self._read, args=(server, device), name="rank-stream", daemon=True).start()
        self._pipe.send(ready=True)
        self._stream.send_message(ready=True)

    def receive(self) -> tuple[int, NDArray[np.int32]]:
        while callable(item := self._steps.get()):
            item()
        return item

    def _read(self, server: PoolServer, device: torch.device) -> None:
        """Requests for the pool are handled at once, before any step that was sent after them can begin."""
        try:
            if device.type == "cuda":
                import torch

                torch.cuda.set_device(device)
            while True:
                for frame in self._stream.receive():
                    if frame.content == Content.STEP:
                        self._steps.put(frame.step())
                    else:
                        server.handle(frame.message())
        except ConnectionError:
            self._closed()
        except Exception as error:  # noqa: BLE001 - the thread's boundary: the rank ends
            self._fail(error)

    def _closed(self) -> None:
        """Rank 0 has ended or has closed the stream. The process that forked this rank knows which, and kills the rank
        if it waits for others."""
        import numpy as np

        from engine.model.other_ranks import Kind

        self._steps.put((Kind.CLOSE, np.zeros(0, np.int32)))

    def _fail(self, error: Exception) -> None:
        self._pipe.failed(error)
        os._exit(1)


def pack_request(number: int, request: dict[str, Any]) -> NDArray[np.int32]:
    """A request for the pool of rank `number`, as the ring carries it: the number, the bytes of the JSON object, and
    the object, padded."""
    import numpy as np

    data = json.dumps(request, separators=(",", ":")).encode()
    return np.frombuffer(struct.pack("=ii", number, len(data)) + data + bytes(-len(data) % 4), np.int32)


def unpack_request(values: NDArray[np.int32]) -> tuple[int, dict[str, Any]]:
    """The reverse of `pack_request`."""
    return int(values[0]), json.loads(values[2:].tobytes()[: int(values[1])])


def store_at(at: HostPort, **more: Any) -> Any:
    """torch's TCPStore at this address."""
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(at.host, at.port, wait_for_workers=False, timeout=timedelta(seconds=JOIN_S), **more)


def join_group(store: Any, rank: int, size: int, device: torch.device, host: str = LOOPBACK) -> RankGroup:
    """Join the group of all ranks. host: the address at which the others reach this one. Raises RuntimeError."""
    from engine.model.parallel.group import GlooRanks

    ranks = GlooRanks(store, rank, size, host=host)
    if device.type == "cpu":
        return ranks

    from engine.model.parallel.gpus import GpuRanks

    return GpuRanks(ranks, device)
