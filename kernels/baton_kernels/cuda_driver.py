"""Calls of CUDA's driver, for what torch does not offer, or does too slowly for dozens of calls a layer.

Calls use the calling thread's current context. Streams and events are torch's handles (`cuda_stream`, `cuda_event`),
which are the driver's.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

HANDLE_BYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1
_PORTABLE, _DEVICEMAP = 1, 2


class CudaError(RuntimeError):
    """A call failed; the text names it and the driver's error."""


class _IpcHandle(ctypes.Structure):
    """CUipcMemHandle, passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class CudaDriver:
    """The calls needed here. Raises CudaError where there is no driver."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError(f"CUDA's driver cannot be loaded: {error}") from None
        self._library.cuGetErrorName.argtypes = (c_int, POINTER(c_char_p))
        self._record = _typed(self._library.cuEventRecord, c_void_p, c_void_p)
        self._wait = _typed(self._library.cuStreamWaitEvent, c_void_p, c_void_p, c_uint)
        self._copy = _typed(self._library.cuMemcpyDtoDAsync_v2, c_uint64, c_uint64, c_size_t, c_void_p)
        self._write = _typed(self._library.cuStreamWriteValue64_v2, c_void_p, c_uint64, c_uint64, c_uint)

    # ---- streams and events ----

    def record(self, event: int, stream: int) -> None:
        self._check("cuEventRecord", self._record(event, stream))

    def wait(self, stream: int, event: int) -> None:
        """Make work queued on the stream from now on wait for what the event has recorded."""
        self._check("cuStreamWaitEvent", self._wait(stream, event, 0))

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Queue a copy between addresses of GPUs, by a copy engine where they are two."""
        self._check("cuMemcpyDtoDAsync", self._copy(target, source, num_bytes, stream))

    def write_value(self, stream: int, address: int, value: int) -> None:
        """Write the value (64 bits) once all work queued on the stream is done. With these flags the write follows a
        fence like `__threadfence_system`, but for the whole stream (CUstreamWriteValue_flags): what its kernels stored
        at a peer is visible before the value is."""
        self._check("cuStreamWriteValue64", self._write(stream, address, value, 0))

    # ---- memory ----

    def address_range(self, address: int) -> tuple[int, int]:
        """The start of the allocation that contains the address, and its size in bytes."""
        base, size = c_uint64(), c_size_t()
        get = _typed(self._library.cuMemGetAddressRange_v2, POINTER(c_uint64), POINTER(c_size_t), c_uint64)
        self._check("cuMemGetAddressRange", get(byref(base), byref(size), address))
        return base.value, size.value

    def get_handle(self, base: int) -> bytes:
        """The name of an allocation for `open_handle` in another process, [HANDLE_BYTES]."""
        handle = _IpcHandle()
        get = _typed(self._library.cuIpcGetMemHandle, POINTER(_IpcHandle), c_uint64)
        self._check("cuIpcGetMemHandle", get(byref(handle), base))
        return bytes(handle)

    def open_handle(self, handle: bytes) -> int:
        """The address at which another process's allocation is mapped into this one, until `close_handle`."""
        address, value = c_uint64(), _IpcHandle.from_buffer_copy(handle)
        open_ = _typed(self._library.cuIpcOpenMemHandle_v2, POINTER(c_uint64), _IpcHandle, c_uint)
        self._check("cuIpcOpenMemHandle", open_(byref(address), value, _LAZY_ENABLE_PEER_ACCESS))
        return address.value

    def close_handle(self, address: int) -> None:
        self._check("cuIpcCloseMemHandle", _typed(self._library.cuIpcCloseMemHandle, c_uint64)(address))

    def register_host(self, address: int, num_bytes: int) -> None:
        """Make this host memory accessible to the device."""
        register = _typed(self._library.cuMemHostRegister_v2, c_void_p, c_size_t, c_uint)
        self._check("cuMemHostRegister", register(address, num_bytes, _PORTABLE | _DEVICEMAP))

    def device_pointer(self, address: int) -> int:
        """The device's address of registered host memory."""
        on_device = c_uint64()
        get = _typed(self._library.cuMemHostGetDevicePointer_v2, POINTER(c_uint64), c_void_p, c_uint)
        self._check("cuMemHostGetDevicePointer", get(byref(on_device), address, 0))
        return on_device.value

    def unregister_host(self, address: int) -> None:
        self._check("cuMemHostUnregister", _typed(self._library.cuMemHostUnregister, c_void_p)(address))

    def _check(self, call: str, error: int) -> None:
        if error:
            text = c_char_p()
            self._library.cuGetErrorName(error, byref(text))
            raise CudaError(f"{call}: {(text.value or str(error).encode()).decode()}")


@functools.cache
def driver() -> CudaDriver:
    """Raises CudaError."""
    return CudaDriver()


def _typed(function: Any, *argument_types: Any) -> Any:
    function.argtypes, function.restype = argument_types, c_int
    return function
