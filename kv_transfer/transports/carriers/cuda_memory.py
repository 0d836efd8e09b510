"""A GPU's memory that other processes of this host can map, by CUDA IPC through the driver's own calls.

PyTorch's way of sharing keeps files with reference counts, and memory that waits for them; here a connection says when
memory is used no more. From the driver's documentation: a handle names a whole allocation; opening it again in the same
context gives the same address, which must be closed as often; the exporting GPU need not be visible to who opens it;
closing leaves the original as it is; to free the original while it is open elsewhere is undefined. So slots' memory
goes back to PyTorch only when the peers have closed their connections (`Staging.forget_retired`), or with the process.

And of `cuStreamWriteValue64`: with flags 0, a fence comes before the write that is as `__threadfence_system`, but for
all of the stream (CUstreamWriteValue_flags), so what the stream's kernels stored at a peer is there before the value
is; memory of `cuMemHostRegister` is named by `cuMemHostGetDevicePointer`.
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
from kv_transfer.native import OnDevice
from kv_transfer.transports.carriers.completion_flags import FLAG_BYTES, NO_FLAG, open_flags

_HANDLE_BYTES = 64
_SIZE = struct.Struct("<Q")
_LAZY_ENABLE_PEER_ACCESS = 1
_PORTABLE, _DEVICEMAP = 1, 2


class _Handle(ctypes.Structure):
    """CUipcMemHandle, passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)


class _Driver:
    """The calls of libcuda that are needed. They use the calling thread's current context."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise TransferError(f"CUDA's driver cannot be loaded: {error}") from None
        self._library.cuGetErrorName.argtypes = (c_int, POINTER(c_char_p))
        self._functions: dict[str, Any] = {}  # those called so far: to look one up takes as long as to call it

    def address_range(self, address: int) -> tuple[int, int]:
        """Where the allocation begins, and its bytes."""
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
        """Let the device use that memory of the host."""
        self._call("cuMemHostRegister_v2", (c_void_p, c_size_t, c_uint), address, num_bytes, _PORTABLE | _DEVICEMAP)

    def device_pointer(self, address: int) -> int:
        """Where the device finds it."""
        on_device = c_uint64()
        arguments = (POINTER(c_uint64), c_void_p, c_uint)
        self._call("cuMemHostGetDevicePointer_v2", arguments, byref(on_device), address, 0)
        return on_device.value

    def unregister_host(self, address: int) -> None:
        self._call("cuMemHostUnregister", (c_void_p,), address)

    def write_value(self, stream: Any, address: int, value: int) -> None:
        """Once all is done that is queued on that torch.cuda.Stream."""
        arguments = (c_void_p, c_uint64, c_uint64, c_uint)
        self._call("cuStreamWriteValue64_v2", arguments, stream.cuda_stream, address, value, 0)

    def _call(self, name: str, argument_types: tuple[Any, ...], *arguments: Any) -> None:
        if (function := self._functions.get(name)) is None:
            function = self._library[name]
            function.argtypes, function.restype = argument_types, c_int
            self._functions[name] = function  # now other threads may call it
        if error := function(*arguments):
            text = c_char_p()
            self._library.cuGetErrorName(error, byref(text))
            raise TransferError(f"{name}: {(text.value or str(error).encode()).decode()}")


class CudaMemory:
    """How slots on this process's GPU are named to other processes, and theirs are mapped and written to here."""

    path = "CUDA IPC"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._driver = _Driver()
        self._stream: Any = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._flag_writers: dict[bytes, CudaFlagWriter] = {}  # by region: those that are open

    def start(self) -> None:
        """On the thread that calls the rest."""
        torch.cuda.set_device(self._device)
        torch.cuda.current_stream().synchronize()  # makes the device's context current on this thread

    def export(self, memory: Tensor) -> tuple[bytes, int]:
        """The allocation that the memory lies in, for `open` elsewhere, and where there. Raises TransferError."""
        with torch.cuda.device(self._device):
            base, size = self._driver.address_range(memory.data_ptr())
            return self._driver.get_handle(base) + _SIZE.pack(size), memory.data_ptr() - base

    def open(self, region: bytes) -> Tensor:
        """Map another process's allocation: [num_bytes], uint8, to torch a tensor on this process's own device, which
        can reach it. Raises TransferError, also where that GPU is out of its reach."""
        if len(region) != _HANDLE_BYTES + _SIZE.size:
            raise TransferError(f"an allocation is named by {_HANDLE_BYTES + _SIZE.size} bytes, not {len(region)}")
        handle, (size,) = region[:_HANDLE_BYTES], _SIZE.unpack(region[_HANDLE_BYTES:])
        try:
            address = self._driver.open_handle(handle)
        except TransferError as error:
            reason = f"{error.message}; has its GPU peer access to this one, and do containers have --ipc=host?"
            raise TransferError(f"memory of another GPU process cannot be mapped: {reason}") from None
        # What torch makes of a bare pointer is on the GPU that owns the memory: a launch, or a copy's streams, would be
        # there, with a context of its own; or no such GPU is visible.
        storage = torch._C._construct_storage_from_data_pointer(address, self._device, size)
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage, 0, (size,), (1,))

    def close(self, mapped: Tensor) -> None:
        """Nobody uses it any more. Raises TransferError."""
        self._driver.close_handle(mapped.data_ptr())

    def flag_writer(self, region: bytes) -> CudaFlagWriter:
        """A peer's, the same however often it is asked for, since an earlier connection to it may be open yet; to be
        closed as often. Raises TransferError."""
        if (flag_writer := self._flag_writers.get(region)) is None:
            flags = open_flags(region)
            flag_writer = CudaFlagWriter(
                self._driver, self._device, self._stream, flags, lambda: self._flag_writers.pop(region)
            )
            self._flag_writers[region] = flag_writer
        flag_writer.num_users += 1
        return flag_writer

    def copy(self, source: Tensor, target: Tensor) -> CudaCopy:
        """Begin to copy, beside all else that the device does."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return CudaCopy(event)


class CudaFlagWriter:
    """A `FlagWriter` whose flags the device writes.

    flags: a peer's, mapped into this process for as long as the writer is open. `closed` is called by its last user.
    Raises TransferError when the device cannot write there in a stream's order.
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
        with torch.cuda.device(self._device), contextlib.suppress(TransferError):  # END says it too
            self._driver.write_value(stream, self._on_device + flag * FLAG_BYTES, number)

    def close(self) -> None:
        self.num_users -= 1
        if not self.num_users:
            self._closed()
            self._driver.unregister_host(self._flags.data_ptr())


class CudaCopy(OnDevice):
    """A copy that the device makes."""

    def advance(self) -> None:
        """It does by itself."""

    def cut(self) -> None:
        """It cannot be: it ends soon."""
