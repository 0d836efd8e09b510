"""Copies between GPUs by their copy engines, which need no SMs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from ctypes import c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

import torch

from engine.model.parallel.sequence_parallel import Copy


class CopyEngines:
    """Implements CopyQueue, on a stream of its own. It calls the driver itself: a layer of a long step has dozens of
    copies, and queueing one through torch took a host 35 us, and 7 us this way. Raises OSError without a driver."""

    def __init__(self, device: torch.device) -> None:
        self._device = device.index
        self._stream: Any = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(self._stream)  # torch creates an event when it is recorded
        self._handles = self._stream.cuda_stream, self._event.cuda_event
        driver = ctypes.CDLL("libcuda.so.1")
        self._copy, self._record, self._wait = (
            driver.cuMemcpyDtoDAsync_v2,
            driver.cuEventRecord,
            driver.cuStreamWaitEvent,
        )
        self._copy.argtypes = (c_uint64, c_uint64, c_size_t, c_void_p)
        self._record.argtypes = (c_void_p, c_void_p)
        self._wait.argtypes = (c_void_p, c_void_p, c_uint)

    @property
    def is_captured(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def start(self, copies: Iterable[Copy]) -> None:
        """See CopyQueue. Raises RuntimeError."""
        stream, event = self._handles
        error = self._record(event, torch._C._cuda_getCurrentRawStream(self._device)) or self._wait(stream, event, 0)
        for to, source, num_bytes in copies:
            error = error or self._copy(to, source, num_bytes, stream)
        if error:
            raise RuntimeError(f"a copy between GPUs failed: CUDA's driver returned {error}")

    def join(self) -> None:
        torch.cuda.current_stream().wait_stream(self._stream)
