"""A CUDA stream whose copies, signals and waits take no SM: the driver gives them to copy engines and to the front end.

A kernel that copies or waits would hold SMs that a matmul beside it needs. As in NCCL's copy-engine collectives
(`src/ce_coll.cc`), a signal is a 1 in memory of the GPU that waits for it, and the waiting stream sets it back to 0, so
that the same calls can be in a CUDA graph that is launched again and again.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

import torch

FLAG_BYTES = 4
_OPERATION = struct.Struct("<IxxxxQQIxxxxQQ")
"""CUstreamBatchMemOpParams: operation, address, value, flags, alias (used by none of ours); the rest fills a union."""
_WAIT_VALUE_32, _WRITE_VALUE_32 = 1, 2
_WAIT_EQUAL, _WRITE_AFTER_ALL = 1, 0


@functools.cache
def _driver() -> Any:
    """The driver's library. Raises OSError."""
    library = ctypes.CDLL("libcuda.so.1")
    library.cuGetErrorName.argtypes = (c_int, POINTER(c_char_p))
    library.cuMemcpyDtoDAsync_v2.argtypes = (c_uint64, c_uint64, c_size_t, c_void_p)
    library.cuStreamBatchMemOp_v2.argtypes = (c_void_p, c_uint, c_char_p, c_uint)
    return library


def _check(name: str, error: int) -> None:
    if error:
        text = c_char_p()
        _driver().cuGetErrorName(error, byref(text))
        raise RuntimeError(f"{name}: {(text.value or str(error).encode()).decode()}")


class CopyStream:
    """Calls queue work, in order, on a CUDA stream of the current device. Addresses are those at which this device maps
    the memory, which may be another GPU's. Works in a CUDA graph, if the stream follows the captured one, and that one
    follows this stream afterwards. Raises RuntimeError."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._handle: int = stream.cuda_stream
        self._copy, self._batch = _driver().cuMemcpyDtoDAsync_v2, _driver().cuStreamBatchMemOp_v2

    def follow(self, other: CopyStream) -> None:
        """Let what is queued from now on wait for all that is queued on the other stream so far."""
        self._stream.wait_stream(other._stream)

    def run(self, launch: Callable[[], None]) -> None:
        """Call `launch` with this as the current stream."""
        with torch.cuda.stream(self._stream):
            launch()

    def copy(self, to: int, of: int, num_bytes: int) -> None:
        if num_bytes:
            _check("cuMemcpyDtoDAsync", self._copy(to, of, num_bytes, self._handle))

    def signal(self, flags: Sequence[int]) -> None:
        """Set the flags at these addresses, when all that was queued before is done and visible to their GPUs."""
        self._operate([(_WRITE_VALUE_32, flag, 1, _WRITE_AFTER_ALL) for flag in flags])

    def wait(self, flags: Sequence[int]) -> None:
        """Wait until all flags at these addresses are set, and set them back."""
        waits = [(_WAIT_VALUE_32, flag, 1, _WAIT_EQUAL) for flag in flags]
        self._operate(waits + [(_WRITE_VALUE_32, flag, 0, _WRITE_AFTER_ALL) for flag in flags])

    def _operate(self, operations: Sequence[tuple[int, int, int, int]]) -> None:
        packed = b"".join(_OPERATION.pack(*operation, 0, 0) for operation in operations)
        _check("cuStreamBatchMemOp", self._batch(self._handle, len(operations), packed, 0))


def current_stream() -> CopyStream:
    return CopyStream(torch.cuda.current_stream())
