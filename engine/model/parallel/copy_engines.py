"""Copies between GPUs by their copy engines, which need no SMs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from baton_kernels.cuda_driver import driver
from engine.model.parallel.sequence_parallel import Copy


class CopyEngines:
    """Implements CopyQueue, on a stream of its own. It calls the driver itself: a layer of a long step has dozens of
    copies, and queueing one through torch took a host 35 us, and 7 us this way. Raises CudaError without a driver."""

    def __init__(self, device: torch.device) -> None:
        self._device = device.index
        self._stream: Any = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        # torch creates an event when it is first recorded: not on our stream, unused until graphs are captured
        self._event.record(torch.cuda.current_stream(device))
        self._handles = self._stream.cuda_stream, self._event.cuda_event
        self._driver = driver()

    @property
    def is_captured(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def start(self, copies: Iterable[Copy]) -> None:
        """See CopyQueue. Raises CudaError."""
        stream, event = self._handles
        self._driver.record(event, torch._C._cuda_getCurrentRawStream(self._device))
        self._driver.wait(stream, event)
        for to, source, num_bytes in copies:
            self._driver.copy(to, source, num_bytes, stream)

    def join(self) -> None:
        torch.cuda.current_stream().wait_stream(self._stream)
