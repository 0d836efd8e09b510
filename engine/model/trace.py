"""torch's profiler, as a Chrome trace."""

from __future__ import annotations

import functools
import gzip
import shutil
from pathlib import Path

import torch
from torch.autograd.profiler import profile


class TorchTrace:
    """Records operators of the thread that calls `start` and `stop`, and kernels of all GPUs. `write` may be called on
    any thread, after `stop`. Making the first one is slow: it loads CUPTI if there is a GPU.

    `torch.profiler.profile` is not used: it wraps the same profiler in a schedule, and its first start imports
    torch.distributed for its metadata, which takes the engine's thread 5 s (torch 2.13).
    """

    def __init__(self) -> None:
        _load()
        self._profile = _new()

    def start(self) -> None:
        self._profile.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        self._profile.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def write(self, path: Path) -> None:
        """Write the trace to `path`, compressed."""
        plain = path.with_suffix("")
        try:
            self._profile.export_chrome_trace(str(plain))  # type: ignore[no-untyped-call]
            with plain.open("rb") as source, gzip.open(path, "wb", compresslevel=5) as target:
                shutil.copyfileobj(source, target)
        finally:
            plain.unlink(missing_ok=True)


def _new() -> profile:
    return profile(use_device="cuda" if torch.cuda.is_available() else None)


@functools.cache
def _load() -> None:
    """Make the profiler load what it needs, on this thread."""
    with _new():
        pass
