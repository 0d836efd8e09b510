"""Calls of CUDA's driver, for what torch does not offer, and for what it does too slowly between two steps or two parts
of KV.

Through torch, making a stream wait takes 10 to 20 us on some hosts, and a launch through Triton 15 to 40; the driver
itself takes 2 to 5. Calls use the calling thread's current context (`CurrentDevice`). Streams and events are torch's
handles (`cuda_stream`, `cuda_event`), which are the driver's.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

import torch

HANDLE_BYTES = 64
_NOT_READY = 600
_LAZY_ENABLE_PEER_ACCESS = 1
_PORTABLE, _DEVICEMAP = 1, 2
_END, _BUFFER, _BUFFER_SIZE = 0, 1, 2
"""CU_LAUNCH_PARAM_...: names of what follows in a launch's `extra`."""
_FORMATS = {"i1": "?", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u8": "B", "u16": "H", "u32": "I", "u64": "Q"}
"""By Triton's names of types; `*...` is a pointer."""


class CudaError(RuntimeError):
    """A call failed; the text names it and the driver's error."""


class _IpcHandle(ctypes.Structure):
    """CUipcMemHandle, passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class CudaDriver:
    """The calls needed here. Those that may take long release the interpreter; short ones hold it, since to get it back
    from a waiting thread takes longer than the call. Raises CudaError where there is no driver."""

    def __init__(self) -> None:
        try:
            self._long, self._short = ctypes.CDLL("libcuda.so.1"), ctypes.PyDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError(f"CUDA's driver cannot be loaded: {error}") from None
        self._long.cuGetErrorName.argtypes = (c_int, POINTER(c_char_p))
        short = self._short
        self._record = _typed(short.cuEventRecord, c_void_p, c_void_p)
        self._wait = _typed(short.cuStreamWaitEvent, c_void_p, c_void_p, c_uint)
        self._query = _typed(short.cuEventQuery, c_void_p)
        self._get_context = _typed(short.cuCtxGetCurrent, POINTER(c_void_p))
        self._copy = _typed(short.cuMemcpyDtoDAsync_v2, c_uint64, c_uint64, c_size_t, c_void_p)
        self._write = _typed(short.cuStreamWriteValue64_v2, c_void_p, c_uint64, c_uint64, c_uint)
        self.launch_kernel = _typed(short.cuLaunchKernel, c_void_p, *(c_uint,) * 7, c_void_p, c_void_p, c_void_p)
        """cuLaunchKernel, which returns its error."""

    # ---- streams and events ----

    def record(self, event: int, stream: int) -> None:
        self.check("cuEventRecord", self._record(event, stream))

    def wait(self, stream: int, event: int) -> None:
        """Make work queued on the stream from now on wait for what the event has recorded."""
        self.check("cuStreamWaitEvent", self._wait(stream, event, 0))

    def is_over(self, event: int) -> bool | None:
        """Whether all that the event has recorded is done. None: the driver cannot tell, for lack of a context or after
        an error of the device."""
        error = self._query(event)
        return error == 0 if error in (0, _NOT_READY) else None

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Queue a copy between addresses of GPUs, by a copy engine where they are two."""
        self.check("cuMemcpyDtoDAsync", self._copy(target, source, num_bytes, stream))

    def write_value(self, stream: int, address: int, value: int) -> None:
        """Write the value (64 bits) once all work queued on the stream is done. With these flags the write follows a
        fence like `__threadfence_system`, but for the whole stream (CUstreamWriteValue_flags)."""
        self.check("cuStreamWriteValue64", self._write(stream, address, value, 0))

    # ---- contexts and memory ----

    @property
    def has_context(self) -> bool:
        """Whether the calling thread has a current context."""
        context = c_void_p()
        self.check("cuCtxGetCurrent", self._get_context(byref(context)))
        return context.value is not None

    def address_range(self, address: int) -> tuple[int, int]:
        """The start of the allocation that contains the address, and its size in bytes."""
        base, size = c_uint64(), c_size_t()
        get = _typed(self._long.cuMemGetAddressRange_v2, POINTER(c_uint64), POINTER(c_size_t), c_uint64)
        self.check("cuMemGetAddressRange", get(byref(base), byref(size), address))
        return base.value, size.value

    def get_handle(self, base: int) -> bytes:
        """The name of an allocation for `open_handle` in another process, [HANDLE_BYTES]."""
        handle = _IpcHandle()
        get = _typed(self._long.cuIpcGetMemHandle, POINTER(_IpcHandle), c_uint64)
        self.check("cuIpcGetMemHandle", get(byref(handle), base))
        return bytes(handle)

    def open_handle(self, handle: bytes) -> int:
        """The address at which another process's allocation is mapped into this one, until `close_handle`."""
        address, value = c_uint64(), _IpcHandle.from_buffer_copy(handle)
        open_ = _typed(self._long.cuIpcOpenMemHandle_v2, POINTER(c_uint64), _IpcHandle, c_uint)
        self.check("cuIpcOpenMemHandle", open_(byref(address), value, _LAZY_ENABLE_PEER_ACCESS))
        return address.value

    def close_handle(self, address: int) -> None:
        self.check("cuIpcCloseMemHandle", _typed(self._long.cuIpcCloseMemHandle, c_uint64)(address))

    def register_host(self, address: int, num_bytes: int) -> None:
        """Make this host memory accessible to the device."""
        register = _typed(self._long.cuMemHostRegister_v2, c_void_p, c_size_t, c_uint)
        self.check("cuMemHostRegister", register(address, num_bytes, _PORTABLE | _DEVICEMAP))

    def device_pointer(self, address: int) -> int:
        """The device's address of registered host memory."""
        on_device = c_uint64()
        get = _typed(self._long.cuMemHostGetDevicePointer_v2, POINTER(c_uint64), c_void_p, c_uint)
        self.check("cuMemHostGetDevicePointer", get(byref(on_device), address, 0))
        return on_device.value

    def unregister_host(self, address: int) -> None:
        self.check("cuMemHostUnregister", _typed(self._long.cuMemHostUnregister, c_void_p)(address))

    # ---- kernels ----

    def parameters_of(self, function: int) -> list[tuple[int, int]]:
        """(offset, bytes) of a kernel's parameters. Raises CudaError, also with drivers before CUDA 12.4."""
        if not hasattr(self._long, "cuFuncGetParamInfo"):
            raise CudaError("this driver does not tell a kernel's parameters")
        get = _typed(self._long.cuFuncGetParamInfo, c_void_p, c_size_t, POINTER(c_size_t), POINTER(c_size_t))
        found: list[tuple[int, int]] = []
        offset, size = c_size_t(), c_size_t()
        while not get(function, len(found), byref(offset), byref(size)):
            found.append((offset.value, size.value))
        return found

    def check(self, call: str, error: int) -> None:
        if error:
            text = c_char_p()
            self._long.cuGetErrorName(error, byref(text))
            raise CudaError(f"{call}: {(text.value or str(error).encode()).decode()}")


@functools.cache
def driver() -> CudaDriver:
    """Raises CudaError."""
    return CudaDriver()


class CurrentDevice(torch.cuda.device):
    """Like its base, and the thread has the device's context. Torch does nothing on a new thread if the device is the
    first, since the runtime would set its context with its first call; the driver does not."""

    def __enter__(self) -> None:
        super().__enter__()  # type: ignore[no-untyped-call]
        if not driver().has_context:
            torch.cuda.current_stream().query()  # a call of the runtime


class DriverEvent:
    """A torch.cuda.Event, recorded, awaited and queried by the driver. blocking: as for torch's."""

    def __init__(self, stream: Any, blocking: bool) -> None:
        events: Any = torch.cuda.Event
        self._event = events(blocking=blocking)
        self._event.record(stream)  # torch creates an event when it is recorded
        self._handle = int(self._event.cuda_event)
        self._driver = driver()

    def record(self, stream: int) -> None:
        self._driver.record(self._handle, stream)

    def make_wait(self, stream: int) -> None:
        """Work queued on the stream from now on waits."""
        self._driver.wait(stream, self._handle)

    def query(self) -> bool:
        """Whether it is over. On any thread. Raises RuntimeError after an error of the device."""
        is_over = self._driver.is_over(self._handle)
        return bool(self._event.query()) if is_over is None else is_over

    def synchronize(self) -> None:
        self._event.synchronize()


class DriverKernel:
    """A kernel compiled by Triton, launched by the driver, without what Triton looks up for each launch.

    compiled: as a launch through Triton returns it, which must have been on the current device. num_arguments: those
    that are not constexpr. Raises CudaError if Triton has made another one constexpr, or if the kernel needs more than
    its arguments: memory of Triton's, clusters, a cooperative or a programmatic launch.
    """

    def __init__(self, compiled: Any, num_arguments: int) -> None:
        self._driver = driver()
        needs = compiled.metadata
        extras = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
        if any(getattr(needs, name, 0) for name in extras) or getattr(needs, "num_ctas", 1) != 1:
            raise CudaError("the kernel needs more than its arguments")
        types = [kind for kind in compiled.src.signature.values() if kind != "constexpr"]
        if len(types) != num_arguments:
            raise CudaError(f"the kernel has {len(types)} arguments, not {num_arguments}")
        parameters = self._driver.parameters_of(compiled.function)
        pointers = ["*"] * (len(parameters) - len(types))  # to memory of Triton's, which this kernel does not use
        self._padding = (0,) * len(pointers)
        self._buffer = buffer_of([*types, *pointers], parameters)
        self._function = compiled.function
        self._block = 32 * needs.num_warps, 1, 1, needs.shared
        self._compiled = compiled  # owns the function

    def prepared(self, grid: tuple[int, int, int], arguments: Sequence[int], stream: int) -> PreparedLaunch:
        """arguments: the kernel's `num_arguments`, in its order; a tensor by its address."""
        buffer = ctypes.create_string_buffer(self._buffer.pack(*arguments, *self._padding), self._buffer.size)
        return PreparedLaunch(self._driver, (self._function, *grid, *self._block, stream, None), buffer)


class PreparedLaunch:
    """A launch with its arguments, for one call or several, on any thread. Raises CudaError."""

    def __init__(self, cuda: CudaDriver, how: tuple[Any, ...], buffer: Any) -> None:
        self._driver = cuda
        self._size = c_size_t(len(buffer))
        self._buffer = buffer
        extra = (c_void_p * 5)(_BUFFER, ctypes.addressof(buffer), _BUFFER_SIZE, ctypes.addressof(self._size), _END)
        self._arguments = *how, extra

    def __call__(self) -> None:
        if error := self._driver.launch_kernel(*self._arguments):
            self._driver.check("cuLaunchKernel", error)


def _typed(function: Any, *argument_types: Any) -> Any:
    function.argtypes, function.restype = argument_types, c_int
    return function


def buffer_of(types: Sequence[str], parameters: Sequence[tuple[int, int]]) -> struct.Struct:
    """The buffer of parameters of these types. Raises CudaError if the driver says that they lie otherwise."""
    text = "@"
    for kind, (offset, size) in zip(types, parameters, strict=True):
        code = "Q" if kind.startswith("*") else _FORMATS.get(kind)
        if code is None or struct.calcsize(text + code) != offset + size or struct.calcsize("@" + code) != size:
            raise CudaError(f"a parameter of type {kind} is not at {offset}, or not of {size} bytes")
        text += code
    return struct.Struct(text)
