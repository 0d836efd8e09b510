"""The CUDA streams on which a process does what should not wait for the engine's steps, one of each for a device.

They are few, and once graphs are captured, no kernel is launched on them by itself (`baton_kernels.kernel_graph`):
that would make all CUDA graphs slower (docs/performance.md), with an 8B model by 0.1 ms a step.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


def side_stream(device: torch.device) -> Any:
    """The torch.cuda.Stream for what is done at the start, the captures of CUDA graphs last, and then for short work
    whose end a thread waits for. Nothing here waits for a step under way."""
    return _stream(_index(device), 0)


def copy_stream(device: torch.device) -> Any:
    """The torch.cuda.Stream for copies between KV pool and slots, once graphs are captured. Its kernels go before those
    of steps. Where a copy waits for a step, so do the copies behind it."""
    return _stream(_index(device), -1)


def capture_stream(device: torch.device) -> Any:
    """The torch.cuda.Stream for captures of a `KernelGraph`, on which nothing runs."""
    return _stream(_index(device), -2)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@functools.cache
def _stream(index: int, priority: int) -> Any:
    return torch.cuda.Stream(index, priority=priority)  # type: ignore[no-untyped-call]
