"""The transport for nodes of one host: the sender maps the receiver's slots, and stores into them.

Between GPUs by CUDA IPC, over NVLink or PCIe; between CPUs over shared memory. A node exports the allocation that its
slots are in, and peers map it once, when they connect, and unmap it when their connection ends.

**Who may still store into a slot?** Only processes that have a connection to its owner: each keeps it until nothing of
its own is under way (`pair.py`), and its stores end with it when it is killed. When the owner dies while somebody
stores, the mapping keeps the memory until it is closed. Linux says so of shared memory; of CUDA IPC the documentation
does not, so tests/kv_transfer/test_ipc.py asks the driver.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable
from functools import partial
from typing import Protocol

from torch import Tensor

from baton.errors import TransferError
from kv_transfer.carrier import DONE, Native, Note, OneSidedReceiving
from kv_transfer.cuda_memory import CudaMemory
from kv_transfer.host_memory import HostMemory
from kv_transfer.pair import PairTransport
from kv_transfer.pair_address import PairAddress
from kv_transfer.staging import Staging
from kv_transfer.transport import CONNECT_S, MAX_HEADER_BYTES

log = logging.getLogger(__name__)

_OFFSET = struct.Struct("<Q")


class IpcTransport(PairTransport):
    """A `PairTransport` within a host. staging: of memory that can be mapped, as `kv_transfer.staging_for` makes it.
    Raises TransferError when it is not."""

    def __init__(self, staging: Staging, wake: Callable[[], None], interface: str | None = None) -> None:
        super().__init__(staging, wake, IpcCarrier(staging), interface)

    def connect(self, peer: str, address: bytes, timeout_s: float = CONNECT_S) -> None:
        if PairAddress.unpack(address, peer).boot != self._here.boot:
            raise TransferError(f"ipc is for nodes of one host, which {peer} is not on")
        super().connect(peer, address, timeout_s)

    def place(self, peer: str, tag: int, num_bytes: int) -> Tensor | None:
        return self._pair.place(peer, tag, num_bytes)

    def push(self, peer: str, tag: int, slot: int, num_bytes: int, header: bytes, storing: Native = DONE) -> None:
        assert len(header) <= MAX_HEADER_BYTES
        self._pair.call(partial(self._pair.push, peer, tag, slot, num_bytes, header, storing))


class Copy(Native, Protocol):
    """`advance` is called as long as it is under way; `cut` has it end early, if it can."""

    def advance(self) -> None: ...

    def cut(self) -> None: ...


class IpcCarrier:
    """Raises TransferError when the slots cannot be mapped by others."""

    kind = "ipc"

    def __init__(self, staging: Staging) -> None:
        on_gpu = staging.device.type == "cuda"
        if not staging.is_exportable:
            reason = "PYTORCH_CUDA_ALLOC_CONF asks for expandable segments, which other processes cannot map"
            raise TransferError(f"ipc cannot be used: {reason}")
        self.version = "1 between GPUs" if on_gpu else "1 between CPUs"
        self._memory = CudaMemory(staging.device) if on_gpu else HostMemory()
        self._ways: list[IpcSending] = []
        self._places: dict[int, bytes] = {}  # by address: slots keep their memory, or let it rest, until the end
        self.memory = self.place(staging.memory(0))

    def start(self, name: str) -> None:
        self._memory.start()

    def sending(self, peer: str, memory: bytes, note: Note) -> IpcSending:
        way = IpcSending(self._memory, self._ways.remove)
        way.reach(memory, 0)  # says now whether it can be mapped, and the first part need not wait for it
        self._ways.append(way)
        log.info("kv path peer=%s path=%s", peer, self._memory.path)
        return way

    def receiving(self, peer: str, host: str) -> IpcReceiving:
        return IpcReceiving(self)

    def progress(self) -> None:
        for way in self._ways:
            way.advance()

    def close(self) -> None:
        """What is mapped still is being written to."""

    def place(self, memory: Tensor) -> bytes:
        """Where others find a slot's memory."""
        address = memory.data_ptr()
        if address not in self._places:
            region, offset = self._memory.export(memory)
            self._places[address] = _OFFSET.pack(offset) + region
        return self._places[address]


class IpcSending:
    """Owns the mappings of a peer's memory."""

    def __init__(self, memory: CudaMemory | HostMemory, forget: Callable[[IpcSending], None]) -> None:
        self._memory = memory
        self._forget = forget
        self._mapped: dict[bytes, Tensor] = {}
        self._copies: list[Copy] = []

    def send(self, memory: Tensor, num_bytes: int, place: bytes) -> Native:
        copy = self._memory.copy(memory[:num_bytes], self.reach(place, num_bytes))
        self._copies.append(copy)
        return copy

    def reach(self, place: bytes, num_bytes: int) -> Tensor:
        """The first bytes of a slot's memory at the peer, [num_bytes], uint8. Raises TransferError."""
        region, (offset,) = place[_OFFSET.size :], _OFFSET.unpack_from(place)
        if region not in self._mapped:
            self._mapped[region] = self._memory.open(region)
        mapped = self._mapped[region]
        if offset + num_bytes > len(mapped):
            raise TransferError(f"the peer's memory ends at {len(mapped)}, before {offset + num_bytes}")
        return mapped[offset : offset + num_bytes]

    def advance(self) -> None:
        for copy in self._copies:
            copy.advance()
        self._copies = [copy for copy in self._copies if not copy.query()]

    def abort(self) -> None:
        for copy in self._copies:
            copy.cut()

    def close(self) -> None:
        for mapped in self._mapped.values():
            try:
                self._memory.close(mapped)
            except TransferError as error:
                log.warning("memory of a peer stays mapped reason=%s", error.message)
        self._mapped.clear()
        self._forget(self)


class IpcReceiving(OneSidedReceiving):
    def __init__(self, carrier: IpcCarrier) -> None:
        self._carrier = carrier

    def place(self, memory: Tensor) -> bytes:
        return self._carrier.place(memory)
