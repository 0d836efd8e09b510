"""Reads bytes of files into tensors, with several threads that each read and copy, without a second copy of a whole
tensor.

For a GPU, each thread reads spans into its own pinned buffers and copies each to the device while it reads the next.
One thread reads 3 to 6 GB/s from the page cache, and a GPU takes 50 GB/s over PCIe 5: hence several threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from baton.process.resources import num_cpus
from baton_kernels.streams import side_stream
from engine.model.errors import UnsupportedModel
from engine.model.parallel.cut import Runs

SPAN_BYTES = 8 << 20
MIN_RUN_BYTES = 64 << 10
"""Runs of at least this size are read one by one. Between shorter runs, reading the gap takes less time than a call."""
_MAX_THREADS = 12
_BUFFERS_PER_WORKER = 2


@dataclass(frozen=True, slots=True)
class FileSpan:
    """Bytes of a file that hold values of `dtype` for `target`, which may have another dtype and be on any device.
    target: [num_values], adjacent in the file; with a pitch, [num_runs, length], where each run begins `pitch` values
    after the one before. All that lies between runs is read as well."""

    file: Path
    offset: int
    dtype: torch.dtype
    target: Tensor
    pitch: int = 0

    @property
    def num_bytes(self) -> int:
        """The size of the target's values in the file."""
        return self.target.numel() * self.dtype.itemsize

    @property
    def num_read_bytes(self) -> int:
        if not self.pitch:
            return self.num_bytes
        runs, length = self.target.shape
        return ((runs - 1) * self.pitch + length) * self.dtype.itemsize

    def values(self, read: Tensor) -> Tensor:
        """The target's values among the bytes that were read: a view of the target's shape."""
        stored = read.view(self.dtype)
        return stored if not self.pitch else stored.as_strided(self.target.shape, (self.pitch, 1))


def cut_spans(file: Path, offset: int, dtype: torch.dtype, target: Tensor) -> Iterator[FileSpan]:
    """Spans of at most SPAN_BYTES that fill one contiguous tensor."""
    flat = target.view(-1)
    step = SPAN_BYTES // dtype.itemsize
    for start in range(0, flat.numel(), step):
        yield FileSpan(file, offset + start * dtype.itemsize, dtype, flat[start : start + step])


def run_spans(file: Path, offset: int, dtype: torch.dtype, rows: Tensor, runs: Runs) -> Iterator[FileSpan]:
    """Like `cut_spans`, for values in runs of a tensor that begins at `offset`. rows: the targets of the runs,
    [num_runs, length], each contiguous. Short runs are read together with the gaps between them."""
    size, (first, length, pitch, num_runs) = dtype.itemsize, runs
    if not length:
        return
    if length * size >= MIN_RUN_BYTES or pitch * size > SPAN_BYTES // 2:
        for run in range(num_runs):
            yield from cut_spans(file, offset + (first + run * pitch) * size, dtype, rows[run])
        return
    step = SPAN_BYTES // (pitch * size)
    for run in range(0, num_runs, step):
        yield FileSpan(file, offset + (first + run * pitch) * size, dtype, rows[run : run + step], pitch)


@torch.no_grad()
def read_spans(spans: list[FileSpan], loaded: Callable[[int], None] = lambda num_bytes: None) -> None:
    """Fill all targets, which are on one device; `loaded` is called with the number of bytes of each span, on any
    thread. Raises OSError, and UnsupportedModel for a file that ends too early."""
    if not spans:
        return
    device = spans[0].target.device
    if device.type == "cuda":
        # The workers' stream does not wait for the caller's stream, whose queued work may still read this memory.
        torch.cuda.current_stream(device).synchronize()
    spans = sorted(spans, key=lambda span: (span.file, span.offset))
    files = {file: os.open(file, os.O_RDONLY) for file in {span.file for span in spans}}
    num_threads = min(_MAX_THREADS, num_cpus(), len(spans))
    shared = iter(spans)  # threads may share a list's iterator: next() is atomic under the GIL
    try:
        with ThreadPoolExecutor(num_threads, "weights") as threads:
            workers = [threads.submit(_read_spans, shared, files, device, loaded) for _ in range(num_threads)]
            for worker in workers:
                worker.result()
    finally:
        for descriptor in files.values():
            os.close(descriptor)


class ReadWorker(Protocol):
    def take(self, descriptor: int, span: FileSpan) -> None: ...

    def finish(self) -> None: ...


@torch.no_grad()
def _read_spans(
    spans: Iterator[FileSpan], files: dict[Path, int], device: torch.device, loaded: Callable[[int], None]
) -> None:
    worker: ReadWorker = _CudaReadWorker(device) if device.type == "cuda" else _HostReadWorker()
    try:
        for span in spans:
            worker.take(files[span.file], span)
            loaded(span.num_bytes)
    finally:
        worker.finish()


class _HostReadWorker:
    """Reads straight into the target, or through a buffer if the dtype differs or the values are in runs."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def take(self, descriptor: int, span: FileSpan) -> None:
        if span.dtype == span.target.dtype and not span.pitch:
            _read(descriptor, span, span.target.view(torch.uint8))
            return
        if self._buffer is None:
            self._buffer = torch.empty(SPAN_BYTES, dtype=torch.uint8)
        read = self._buffer[: span.num_read_bytes]
        _read(descriptor, span, read)
        span.target.copy_(span.values(read))

    def finish(self) -> None:
        pass


class _CudaReadWorker:
    """Reads into pinned buffers in turn; a buffer is free again once its copy to the device is done."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.set_device(device)  # the current device is per thread
        self._device = device
        self._stream = side_stream(device)
        size = (_BUFFERS_PER_WORKER, SPAN_BYTES)
        self._buffers = list(torch.empty(size, dtype=torch.uint8, pin_memory=True))
        self._copied = [torch.cuda.Event() for _ in self._buffers]  # type: ignore[no-untyped-call]
        self._next = 0

    def take(self, descriptor: int, span: FileSpan) -> None:
        turn = self._next % _BUFFERS_PER_WORKER
        self._next += 1
        self._copied[turn].synchronize()  # returns at once if never recorded
        read = self._buffers[turn][: span.num_read_bytes]
        _read(descriptor, span, read)
        with torch.cuda.stream(self._stream):
            stored = span.values(read)
            if span.dtype != span.target.dtype:  # cast on the device: copy_ between devices would cast on the host
                stored = stored.to(self._device, non_blocking=True)
            span.target.copy_(stored, non_blocking=True)
            self._copied[turn].record(self._stream)

    def finish(self) -> None:
        self._stream.synchronize()


def _read(descriptor: int, span: FileSpan, into: Tensor) -> None:
    """Read with the GIL released. into: [num_bytes], uint8, on the host."""
    buffer = memoryview(into.numpy())  # type: ignore[arg-type] # numpy types it from Python 3.12 on
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:]], span.offset + done)
        if not count:
            raise UnsupportedModel(f"{span.file} ends before its data does")
        done += count
