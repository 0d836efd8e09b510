"""Calls of CUDA's driver, for what torch does not offer, or does too slowly for dozens of calls a layer.

Calls use the calling thread's current context. Streams and events are torch's handles (`cuda_stream`, `cuda_event`),
which are the driver's.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

HANDLE_BYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1
_PORTABLE, _DEVICEMAP = 1, 2
_CAPTURE_MODE_RELAXED = 2


class CudaError(RuntimeError):
    """A call failed; the text names it and the driver's error."""


class _IpcHandle(ctypes.Structure):
    """CUipcMemHandle, passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class KernelParameters(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2. kernel_params: where each of the kernel's arguments lies."""

    _fields_ = (
        ("function", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("kernel_params", POINTER(c_void_p)),
        ("extra", POINTER(c_void_p)),
        ("kernel", c_void_p),
        ("context", c_void_p),
    )


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
        # If these, of a microsecond, gave up the interpreter, other threads might keep it for milliseconds.
        keeping = ctypes.PyDLL("libcuda.so.1")
        self._get_context = _typed(keeping.cuCtxGetCurrent, POINTER(c_void_p))
        self._set = _typed(keeping.cuGraphExecKernelNodeSetParams_v2, c_void_p, c_void_p, POINTER(KernelParameters))
        self._launch = _typed(self._library.cuGraphLaunch, c_void_p, c_void_p)

    # ---- contexts ----

    def context(self) -> int:
        """The calling thread's current one; 0: none, as on a thread that has not used a device yet."""
        found = c_void_p()
        self._check("cuCtxGetCurrent", self._get_context(byref(found)))
        return found.value or 0

    def make_current(self, context: int) -> None:
        """On the calling thread."""
        self._check("cuCtxSetCurrent", _typed(self._library.cuCtxSetCurrent, c_void_p)(context))

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

    # ---- graphs ----

    def begin_capture(self, stream: int) -> None:
        """What this thread queues on the stream is captured from now on."""
        begin = _typed(self._library.cuStreamBeginCapture_v2, c_void_p, c_int)
        self._check("cuStreamBeginCapture", begin(stream, _CAPTURE_MODE_RELAXED))

    def end_capture(self, stream: int) -> int:
        """The captured graph, until `destroy_graph`."""
        graph = c_void_p()
        end = _typed(self._library.cuStreamEndCapture, c_void_p, POINTER(c_void_p))
        self._check("cuStreamEndCapture", end(stream, byref(graph)))
        return graph.value or 0

    def only_kernel(self, graph: int) -> tuple[int, KernelParameters, int]:
        """The node of a graph of one kernel, its parameters, which lie in memory of the graph, and the number of the
        kernel's arguments."""
        node, num, found = c_void_p(), c_size_t(1), KernelParameters()
        nodes = _typed(self._library.cuGraphGetNodes, c_void_p, POINTER(c_void_p), POINTER(c_size_t))
        self._check("cuGraphGetNodes", nodes(graph, byref(node), byref(num)))
        assert num.value == 1, "a graph of one kernel"
        get = _typed(self._library.cuGraphKernelNodeGetParams_v2, c_void_p, POINTER(KernelParameters))
        self._check("cuGraphKernelNodeGetParams", get(node, byref(found)))
        info = _typed(self._library.cuFuncGetParamInfo, c_void_p, c_size_t, POINTER(c_size_t), POINTER(c_size_t))
        count = itertools.takewhile(
            lambda index: not info(found.function, index, byref(c_size_t()), byref(c_size_t())), itertools.count()
        )
        return node.value or 0, found, sum(1 for _ in count)

    def instantiate(self, graph: int) -> int:
        """An executable graph, until `destroy_executable`."""
        executable = c_void_p()
        create = _typed(self._library.cuGraphInstantiateWithFlags, POINTER(c_void_p), c_void_p, c_uint64)
        self._check("cuGraphInstantiate", create(byref(executable), graph, 0))
        return executable.value or 0

    def set_parameters(self, executable: int, node: int, parameters: KernelParameters) -> None:
        """Of the node, for launches from now on. Copies the kernel's arguments."""
        self._check("cuGraphExecKernelNodeSetParams", self._set(executable, node, byref(parameters)))

    def launch_graph(self, executable: int, stream: int) -> None:
        self._check("cuGraphLaunch", self._launch(executable, stream))

    def destroy_graph(self, graph: int) -> None:
        self._check("cuGraphDestroy", _typed(self._library.cuGraphDestroy, c_void_p)(graph))

    def destroy_executable(self, executable: int) -> None:
        self._check("cuGraphExecDestroy", _typed(self._library.cuGraphExecDestroy, c_void_p)(executable))

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
