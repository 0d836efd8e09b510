"""The transport for nodes of one host: the sender maps the receiver's slots, and stores into them.

Between GPUs by CUDA IPC, over NVLink or PCIe; between CPUs over shared memory. A node exports the allocation that
contains its slots; peers map it once, when they connect, and unmap it when their connection ends. With it they map
completion flags (`completion_flags.py`), by which the stores themselves signal that they are over.

**Which processes may still store into a slot?** Only those with a connection to its owner: each keeps the connection
until its own operations are over (`pair/transport.py`), and the stores of a killed process end with it. When the owner
dies during stores, the mapping keeps the memory alive until it is closed. Linux documents this for shared memory, but
CUDA does not for CUDA IPC, so tests/kv_transfer/test_ipc.py tests the driver.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

from torch import Tensor

from baton.errors import TransferError
from baton.rpc.cluster_secret import ClusterSecret
from kv_transfer.async_operation import DONE, AsyncOperation, RemoteSlot, no_signal
from kv_transfer.staging import Staging
from kv_transfer.transport import CONNECT_S, MAX_HEADER_BYTES
from kv_transfer.transports.carriers.completion_flags import (
    NO_FLAG,
    CompletionFlags,
    FlagWriter,
    HostFlagWriter,
    number_of,
)
from kv_transfer.transports.carriers.cuda_memory import CudaMemory
from kv_transfer.transports.host import LOOPBACK
from kv_transfer.transports.host_memory import REGION_BYTES, HostMemory
from kv_transfer.transports.pair.address import PairAddress
from kv_transfer.transports.pair.carrier import Note, OneSidedReceiving
from kv_transfer.transports.pair.transport import PairTransport

log = logging.getLogger(__name__)

_PLACE = struct.Struct(f"<QQ{REGION_BYTES}s")
"""A slot's offset in its region, its flag and the flags' region; the slot's region follows."""
_MOST_REGIONS = 4096
"""The most regions that a peer may name; each transfer that was cut off may add one."""


class _Place(NamedTuple):
    offset: int
    flag: int
    flags: bytes
    region: bytes


def _read_place(place: bytes) -> _Place:
    """Raises TransferError."""
    if len(place) < _PLACE.size:
        raise TransferError(f"a slot is named by {_PLACE.size} bytes or more, not {len(place)}")
    offset, flag, flags = _PLACE.unpack_from(place)
    return _Place(offset, flag, flags, place[_PLACE.size :])


class IpcTransport(PairTransport):
    """A `PairTransport` within a host. staging: must be mappable, as `kv_transfer.staging_for` makes it. Raises
    TransferError when it is not."""

    def __init__(
        self,
        staging: Staging,
        wake: Callable[[], None],
        interface: str | None = None,
        host: str = LOOPBACK,
        secret: ClusterSecret | None = None,
    ) -> None:
        super().__init__(staging, wake, IpcCarrier(staging), interface, host, secret)

    def connect(self, peer: str, address: bytes, timeout_s: float = CONNECT_S) -> None:
        if PairAddress.unpack(address, peer).boot != self._here.boot:
            raise TransferError(f"ipc is for nodes of one host, which {peer} is not on")
        super().connect(peer, address, timeout_s)

    def acquire_remote_slot(self, peer: str, tag: int, num_bytes: int) -> RemoteSlot | None:
        return self._pair.acquire_remote_slot(peer, tag, num_bytes)

    def push(
        self, peer: str, tag: int, slot: int, num_bytes: int, header: bytes, storing: AsyncOperation = DONE
    ) -> None:
        assert len(header) <= MAX_HEADER_BYTES
        self._pair.call(partial(self._pair.push, peer, tag, slot, num_bytes, header, storing))


class Copy(AsyncOperation, Protocol):
    """`advance` is called while the copy is under way; `cut` ends it early, if possible."""

    def advance(self) -> None: ...

    def cut(self) -> None: ...


_written_to: list[IpcSending] = []
"""Sending ends that were still open when their carrier was closed; kept so that their mappings stay."""


class IpcCarrier:
    """Raises TransferError when other processes cannot map the slots."""

    kind = "ipc"

    def __init__(self, staging: Staging) -> None:
        on_gpu = staging.device.type == "cuda"
        if not staging.is_exportable:
            reason = "PYTORCH_CUDA_ALLOC_CONF asks for expandable segments, which other processes cannot map"
            raise TransferError(f"ipc cannot be used: {reason}")
        self.version = "2 between GPUs" if on_gpu else "2 between CPUs"
        self._memory: CudaMemory | HostMemory
        self._open_flag_writer: Callable[[bytes], FlagWriter]
        if on_gpu:
            self._memory = cuda = CudaMemory(staging.device)
            self._open_flag_writer = cuda.flag_writer
        else:
            self._memory, self._open_flag_writer = HostMemory(), HostFlagWriter
        self._ways: list[IpcSending] = []
        # By address, since the memory of slots, retired or not, stays allocated until the end.
        self._places: dict[int, bytes] = {}
        self._flags, self._flag_at = CompletionFlags(), dict[int, int]()
        self.memory = self.export_slot(staging.memory(0))

    def start(self, name: str) -> None:
        self._memory.start()

    def sending(self, peer: str, memory: bytes, note: Note) -> IpcSending:
        way = IpcSending(self._memory, self._open_flag_writer, self._ways.remove)
        self._ways.append(way)
        try:
            way.map(memory)  # fails early if it cannot be mapped, and saves the first part the time
        except TransferError:
            way.close()
            raise
        log.info("kv path peer=%s path=%s flags=%s", peer, self._memory.path, way.has_flags)
        return way

    def receiving(self, peer: str, host: str) -> IpcReceiving:
        return IpcReceiving(self)

    def progress(self) -> None:
        for way in self._ways:
            way.advance()

    def close(self) -> None:
        """Keep what is still mapped, since it is being written to. Memory that is unmapped while it is registered with
        the GPU driver stays registered, and what is mapped at its address next cannot be registered."""
        _written_to.extend(self._ways)

    def export_slot(self, memory: Tensor) -> bytes:
        """The place that tells peers where a slot's memory is."""
        address = memory.data_ptr()
        if address not in self._places:
            region, offset = self._memory.export(memory)
            flag = self._flag_at[address] = self._flags.take()
            self._places[address] = _PLACE.pack(offset, flag, self._flags.region) + region
        return self._places[address]

    def is_signalled(self, memory: Tensor, tag: int) -> bool:
        """Whether the message of that tag is all in the slot's memory."""
        return self._flags.is_signalled(self._flag_at[memory.data_ptr()], tag)


class IpcSending:
    """Owns the mappings of a peer's memory and uses of its flags' writers."""

    def __init__(
        self,
        memory: CudaMemory | HostMemory,
        open_flag_writer: Callable[[bytes], FlagWriter],
        forget: Callable[[IpcSending], None],
    ) -> None:
        self._memory = memory
        self._open_flag_writer = open_flag_writer
        self._forget = forget
        self._mapped: dict[bytes, Tensor] = {}
        self._flag_writers: dict[bytes, FlagWriter | None] = {}  # by region; None: it cannot be opened
        self._copies: list[Copy] = []

    @property
    def has_flags(self) -> bool:
        return any(self._flag_writers.values())

    def send(self, memory: Tensor, num_bytes: int, place: bytes) -> AsyncOperation:
        copy = self._memory.copy(memory[:num_bytes], self._slot(place, num_bytes))
        self._copies.append(copy)
        return copy

    def reach(self, place: bytes, num_bytes: int, tag: int) -> RemoteSlot:
        at = _read_place(place)
        flag, flag_writer = at.flag, self._flag_writer(at.flags)
        if flag_writer is not None and flag >= flag_writer.num_flags:
            raise TransferError(f"the peer has {flag_writer.num_flags} flags, and names {flag}")
        signal = (
            no_signal if flag_writer is None or flag == NO_FLAG else partial(flag_writer.signal, flag, number_of(tag))
        )
        return RemoteSlot(self._slot(place, num_bytes), signal)

    def map(self, place: bytes) -> None:
        """Map the region and the flags of a peer's slot. Raises TransferError."""
        self.reach(place, 0, 0)

    def _slot(self, place: bytes, num_bytes: int) -> Tensor:
        """The first bytes of the peer's slot, [num_bytes], uint8. Raises TransferError."""
        at = _read_place(place)
        region, offset = at.region, at.offset
        if region not in self._mapped:
            if len(self._mapped) >= _MOST_REGIONS:
                raise TransferError(f"the peer names more than {_MOST_REGIONS} regions of memory")
            self._mapped[region] = self._memory.open(region)
        mapped = self._mapped[region]
        if offset + num_bytes > len(mapped):
            raise TransferError(f"the peer's memory ends at {len(mapped)}, before {offset + num_bytes}")
        return mapped[offset : offset + num_bytes]

    def _flag_writer(self, region: bytes) -> FlagWriter | None:
        if region not in self._flag_writers:
            try:
                self._flag_writers[region] = self._open_flag_writer(region)
            except TransferError as error:
                log.info("no completion flags reason=%s", error.message)
                self._flag_writers[region] = None
        return self._flag_writers[region]

    def advance(self) -> None:
        for copy in self._copies:
            copy.advance()
        self._copies = [copy for copy in self._copies if not copy.query()]

    def abort(self) -> None:
        for copy in self._copies:
            copy.cut()

    def close(self) -> None:
        closing = [partial(self._memory.close, mapped) for mapped in self._mapped.values()]
        closing += [
            partial(flag_writer.close) for flag_writer in self._flag_writers.values() if flag_writer is not None
        ]
        for close in closing:
            try:
                close()
            except TransferError as error:
                log.warning("memory of a peer stays mapped reason=%s", error.message)
        self._mapped.clear()
        self._flag_writers.clear()
        self._forget(self)


class IpcReceiving(OneSidedReceiving):
    def __init__(self, carrier: IpcCarrier) -> None:
        self._carrier = carrier

    def export_slot(self, memory: Tensor) -> bytes:
        return self._carrier.export_slot(memory)

    def has_arrived(self, memory: Tensor, tag: int) -> bool:
        return self._carrier.is_signalled(memory, tag)
