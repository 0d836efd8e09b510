"""GPU memory that other processes of this host can map, by CUDA IPC through driver calls.

PyTorch's own sharing keeps files with reference counts, and memory that waits for them; here the end of a connection
shows that memory is no longer used. From the driver's documentation: a handle names a whole allocation; opening it
again in the same context gives the same address, which must be closed as often; the exporting GPU need not be visible
to the process that opens it; closing does not affect the original; freeing the original while it is open elsewhere is
undefined. So slots' memory is returned to PyTorch only when the peers have closed their connections
(`Staging.forget_retired`), or with the process.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from baton.errors import TransferError
from baton_kernels.cuda_driver import HANDLE_BYTES, CudaError, driver
from baton_kernels.streams import copy_stream
from kv_transfer.async_operation import CudaEventOperation
from kv_transfer.transports.carriers.completion_flags import FLAG_BYTES, NO_FLAG, open_flags

_SIZE = struct.Struct("<Q")


@contextlib.contextmanager
def _as_transfer_error() -> Iterator[None]:
    try:
        yield
    except CudaError as error:
        raise TransferError(str(error)) from None


class CudaMemory:
    """Exports slots on this process's GPU to other processes; maps and writes to theirs."""

    path = "CUDA IPC"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with _as_transfer_error():
            self._driver = driver()
        self._stream = copy_stream(device)
        self._flag_writers: dict[bytes, CudaFlagWriter] = {}  # by region: those that are open

    def start(self) -> None:
        """Called on the thread that calls the other methods."""
        torch.cuda.set_device(self._device)
        torch.cuda.current_stream().synchronize()  # makes the device's context current on this thread

    def export(self, memory: Tensor) -> tuple[bytes, int]:
        """The allocation that contains the memory, for `open` in another process, and the offset in it. Raises
        TransferError."""
        with torch.cuda.device(self._device), _as_transfer_error():
            base, size = self._driver.address_range(memory.data_ptr())
            return self._driver.get_handle(base) + _SIZE.pack(size), memory.data_ptr() - base

    def open(self, region: bytes) -> Tensor:
        """Map another process's allocation: [num_bytes], uint8, for torch a tensor on this process's own device, which
        can access it. Raises TransferError, also if this device has no peer access to that GPU."""
        if len(region) != HANDLE_BYTES + _SIZE.size:
            raise TransferError(f"an allocation is named by {HANDLE_BYTES + _SIZE.size} bytes, not {len(region)}")
        handle, (size,) = region[:HANDLE_BYTES], _SIZE.unpack(region[HANDLE_BYTES:])
        try:
            address = self._driver.open_handle(handle)
        except CudaError as error:
            reason = f"{error}; has its GPU peer access to this one, and do containers have --ipc=host?"
            raise TransferError(f"memory of another GPU process cannot be mapped: {reason}") from None
        # By default torch puts a bare pointer on the GPU that owns the memory: kernels and copies would run there, with
        # another context, or that GPU is not visible at all.
        storage = torch._C._construct_storage_from_data_pointer(address, self._device, size)
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage, 0, (size,), (1,))

    def close(self, mapped: Tensor) -> None:
        """Unmap memory that nothing uses any more. Raises TransferError."""
        with _as_transfer_error():
            self._driver.close_handle(mapped.data_ptr())

    def flag_writer(self, region: bytes) -> CudaFlagWriter:
        """The writer for a peer's flags: one per region, shared, since an earlier connection to the peer may still be
        open. Close it as often as it is requested. Raises TransferError."""
        if (flag_writer := self._flag_writers.get(region)) is None:
            flags = open_flags(region)
            with _as_transfer_error():
                flag_writer = CudaFlagWriter(self._device, self._stream, flags, lambda: self._flag_writers.pop(region))
            self._flag_writers[region] = flag_writer
        flag_writer.num_users += 1
        return flag_writer

    def copy(self, source: Tensor, target: Tensor) -> CudaCopy:
        """Start a copy, concurrent with the device's other work."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return CudaCopy(event)


class CudaFlagWriter:
    """A `FlagWriter` whose flags the device writes.

    flags: a peer's, mapped into this process for as long as the writer is open. `closed` is called when its last user
    closes it. Raises CudaError when the device cannot write there in the order of that torch.cuda.Stream.
    """

    def __init__(self, device: torch.device, stream: Any, flags: Tensor, closed: Callable[[], object]) -> None:
        self.num_users = 0
        self.num_flags = len(flags) // FLAG_BYTES
        self._driver = driver()
        self._device = device.index
        self._flags = flags
        self._closed = closed
        self._driver.register_host(flags.data_ptr(), len(flags))
        try:
            self._on_device = self._driver.device_pointer(flags.data_ptr())
            self._driver.write_value(stream.cuda_stream, self._on_device + NO_FLAG * FLAG_BYTES, 0)
        except CudaError:
            self._driver.unregister_host(flags.data_ptr())
            raise

    def signal(self, flag: int, number: int, stream: Any) -> None:
        with torch.cuda.device(self._device), contextlib.suppress(CudaError):  # END is sent anyway
            self._driver.write_value(stream.cuda_stream, self._on_device + flag * FLAG_BYTES, number)

    def close(self) -> None:
        self.num_users -= 1
        if not self.num_users:
            self._closed()
            with _as_transfer_error():
                self._driver.unregister_host(self._flags.data_ptr())


class CudaCopy(CudaEventOperation):
    """A copy that runs on the device."""

    def advance(self) -> None:
        """Nothing to do: the copy advances on the device."""

    def cut(self) -> None:
        """Nothing to do: the copy cannot be cancelled, but ends soon."""
