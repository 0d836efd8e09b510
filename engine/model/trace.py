"""torch's profiler, as a Chrome trace."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


class TorchTrace:
    """Records operators of the thread that calls `start` and `stop`, and kernels of all GPUs. `write` may be called on
    any thread, after `stop`. The first one takes seconds to make."""

    def __init__(self) -> None:
        _load()
        self._profile = _new()

    def start(self) -> None:
        self._profile.start()

    def stop(self) -> None:
        self._profile.stop()

    def write(self, path: Path) -> None:
        """Compressed, if its name ends in .gz."""
        self._profile.export_chrome_trace(str(path))


def _new() -> profile:
    gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    return profile(activities=[ProfilerActivity.CPU, *gpu])


@functools.cache
def _load() -> None:
    """Have the profiler load what it needs on this thread: its first start imports for 5 s (torch 2.13)."""
    first = _new()
    first.start()
    first.stop()
