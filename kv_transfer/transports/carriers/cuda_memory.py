"""GPU memory that other processes of this host can map, by CUDA IPC through driver calls.

PyTorch's own sharing keeps files with reference counts, and memory that waits for them; here the end of a connection
shows that memory is no longer used. From the driver's documentation: a handle names a whole allocation; opening it
again in the same context gives the same address, which must be closed as often; the exporting GPU need not be visible
to the process that opens it; closing does not affect the original; freeing the original while it is open elsewhere is
undefined. So slots' memory is returned to PyTorch only when the peers have closed their connections
(`Staging.forget_retired`), or with the process.

On `cuStreamWriteValue64`: with flags 0, the write follows a fence like `__threadfence_system`, but for the whole stream
(CUstreamWriteValue_flags), so what the stream's kernels stored at a peer is visible before the value is. The device
address of memory from `cuMemHostRegister` comes from `cuMemHostGetDevicePointer`.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

import torch
from torch import Tensor

from baton.errors import TransferError
from kv_transfer.async_operation import CudaEventOperation
from kv_transfer.transports.carriers.completion_flags import FLAG_BYTES, NO_FLAG, open_flags

_HANDLE_BYTES = 64
_SIZE = struct.Struct("<Q")
_LAZY_ENABLE_PEER_ACCESS = 1
_PORTABLE, _DEVICEMAP = 1, 2


class _Handle(ctypes.Structure):
    """CUipcMemHandle, passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)


class _Driver:
    """The libcuda calls needed here. They use the calling thread's current context."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise TransferError(f"CUDA's driver cannot be loaded: {error}") from None
        self._library.cuGetErrorName.argtypes = (c_int, POINTER(c_char_p))
        self._functions: dict[str, Any] = {}  # those called so far: a look-up takes as long as a call

    def address_range(self, address: int) -> tuple[int, int]:
        """The start of the allocation that contains the address, and its size in bytes."""
        base, size = c_uint64(), c_size_t()
        arguments = (POINTER(c_uint64), POINTER(c_size_t), c_uint64)
        self._call("cuMemGetAddressRange_v2", arguments, byref(base), byref(size), address)
        return base.value, size.value

    def get_handle(self, base: int) -> bytes:
        handle = _Handle()
        self._call("cuIpcGetMemHandle", (POINTER(_Handle), c_uint64), byref(handle), base)
        return bytes(handle)

    def open_handle(self, handle: bytes) -> int:
        address, value = c_uint64(), _Handle.from_buffer_copy(handle)
        arguments = (POINTER(c_uint64), _Handle, c_uint)
        self._call("cuIpcOpenMemHandle_v2", arguments, byref(address), value, _LAZY_ENABLE_PEER_ACCESS)
        return address.value

    def close_handle(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", (c_uint64,), address)

    def register_host(self, address: int, num_bytes: int) -> None:
        """Make this host memory accessible to the device."""
        self._call("cuMemHostRegister_v2", (c_void_p, c_size_t, c_uint), address, num_bytes, _PORTABLE | _DEVICEMAP)

    def device_pointer(self, address: int) -> int:
        """The device's address of registered host memory."""
        on_device = c_uint64()
        arguments = (POINTER(c_uint64), c_void_p, c_uint)
        self._call("cuMemHostGetDevicePointer_v2", arguments, byref(on_device), address, 0)
        return on_device.value

    def unregister_host(self, address: int) -> None:
        self._call("cuMemHostUnregister", (c_void_p,), address)

    def write_value(self, stream: Any, address: int, value: int) -> None:
        """Write the value once all work queued on that torch.cuda.Stream is done."""
        arguments = (c_void_p, c_uint64, c_uint64, c_uint)
        self._call("cuStreamWriteValue64_v2", arguments, stream.cuda_stream, address, value, 0)

    def _call(self, name: str, argument_types: tuple[Any, ...], *arguments: Any) -> None:
        if (function := self._functions.get(name)) is None:
            function = self._library[name]
            function.argtypes, function.restype = argument_types, c_int
            self._functions[name] = function  # complete: other threads may call it now
        if error := function(*arguments):
            text = c_char_p()
            self._library.cuGetErrorName(error, byref(text))
            raise TransferError(f"{name}: {(text.value or str(error).encode()).decode()}")


class CudaMemory:
    """Exports slots on this process's GPU to other processes; maps and writes to theirs."""

    path = "CUDA IPC"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._driver = _Driver()
        self._stream: Any = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._flag_writers: dict[bytes, CudaFlagWriter] = {}  # by region: those that are open

    def start(self) -> None:
        """Called on the thread that calls the other methods."""
        torch.cuda.set_device(self._device)
        torch.cuda.current_stream().synchronize()  # makes the device's context current on this thread

    def export(self, memory: Tensor) -> tuple[bytes, int]:
        """The allocation that contains the memory, for `open` in another process, and the offset in it. Raises
        TransferError."""
        with torch.cuda.device(self._device):
            base, size = self._driver.address_range(memory.data_ptr())
            return self._driver.get_handle(base) + _SIZE.pack(size), memory.data_ptr() - base

    def open(self, region: bytes) -> Tensor:
        """Map another process's allocation: [num_bytes], uint8, for torch a tensor on this process's own device, which
        can access it. Raises TransferError, also if this device has no peer access to that GPU."""
        if len(region) != _HANDLE_BYTES + _SIZE.size:
            raise TransferError(f"an allocation is named by {_HANDLE_BYTES + _SIZE.size} bytes, not {len(region)}")
        handle, (size,) = region[:_HANDLE_BYTES], _SIZE.unpack(region[_HANDLE_BYTES:])
        try:
            address = self._driver.open_handle(handle)
        except TransferError as error:
            reason = f"{error.message}; has its GPU peer access to this one, and do containers have --ipc=host?"
            raise TransferError(f"memory of another GPU process cannot be mapped: {reason}") from None
        # By default torch puts a bare pointer on the GPU that owns the memory: kernels and copies would run there, with
        # another context, or that GPU is not visible at all.
        storage = torch._C._construct_storage_from_data_pointer(address, self._device, size)
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage, 0, (size,), (1,))

    def close(self, mapped: Tensor) -> None:
        """Unmap memory that nothing uses any more. Raises TransferError."""
        self._driver.close_handle(mapped.data_ptr())

    def flag_writer(self, region: bytes) -> CudaFlagWriter:
        """The writer for a peer's flags: one per region, shared, since an earlier connection to the peer may still be
        open. Close it as often as it is requested. Raises TransferError."""
        if (flag_writer := self._flag_writers.get(region)) is None:
            flags = open_flags(region)
            flag_writer = CudaFlagWriter(
                self._driver, self._device, self._stream, flags, lambda: self._flag_writers.pop(region)
            )
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
    closes it. Raises TransferError when the device cannot write there in stream order.
    """

    def __init__(
        self, driver: _Driver, device: torch.device, stream: Any, flags: Tensor, closed: Callable[[], object]
    ) -> None:
        self.num_users = 0
        self.num_flags = len(flags) // FLAG_BYTES
        self._driver = driver
        self._device = device
        self._flags = flags
        self._closed = closed
        driver.register_host(flags.data_ptr(), len(flags))
        try:
            self._on_device = driver.device_pointer(flags.data_ptr())
            driver.write_value(stream, self._on_device + NO_FLAG * FLAG_BYTES, 0)
        except TransferError:
            driver.unregister_host(flags.data_ptr())
            raise

    def signal(self, flag: int, number: int, stream: Any) -> None:
        with torch.cuda.device(self._device), contextlib.suppress(TransferError):  # END is sent anyway
            self._driver.write_value(stream, self._on_device + flag * FLAG_BYTES, number)

    def close(self) -> None:
        self.num_users -= 1
        if not self.num_users:
            self._closed()
            self._driver.unregister_host(self._flags.data_ptr())


class CudaCopy(CudaEventOperation):
    """A copy that runs on the device."""

    def advance(self) -> None:
        """Nothing to do: the copy advances on the device."""

    def cut(self) -> None:
        """Nothing to do: the copy cannot be cancelled, but ends soon."""
