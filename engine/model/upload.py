"""Copies small arrays of numbers between the host and a device, without waiting for either.

On a GPU, a kernel reads or writes pinned memory. Arrays on their way to the device are in an `UploadRing`; what is too
large for it, and what comes back, has memory of its own, which is kept here until the kernel is done. Each thread has
its own memory: the engine's, and the one that scores prompts for a model in stages. A thread must always have the same
current stream.
"""

from __future__ import annotations

import threading
from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton_kernels.host_copy import host_copy
from engine.model.upload_ring import UploadRing

_NUM_SEGMENTS = 8
_SEGMENT_BYTES = 1 << 20


class _Pinned(threading.local):
    """A thread's memory. ring: None until it is needed. in_use: pinned tensors, each with the event after which the
    device does not need it any more. unused: events for later ones, since to create one takes as long as to record it.
    """

    def __init__(self) -> None:
        self.ring: UploadRing | None = None
        self.in_use: deque[tuple[torch.cuda.Event, Tensor]] = deque()
        self.unused: list[torch.cuda.Event] = []


_pinned = _Pinned()


def upload(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """The array on the device. On a CPU it is the array itself."""
    host = torch.from_numpy(array)
    if device.type != "cuda":
        return host
    out = torch.empty(host.shape, dtype=host.dtype, device=device)
    upload_to(out, array)
    return out


def readable(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """The array where a kernel of the device can read it. The kernel must be launched before this thread's next upload,
    and read each number once: it may have to fetch them from the host."""
    if device.type != "cuda":
        return torch.from_numpy(array)
    ring = _ring()
    return torch.from_numpy(ring.put(array)) if array.nbytes <= ring.most_bytes else upload(array, device)


def upload_to(out: Tensor, array: NDArray[np.generic]) -> None:
    """Overwrite `out`, which has the same size and is on a GPU, with the array."""
    if array.nbytes <= _ring().most_bytes:
        host_copy(readable(array, out.device), out)
        return
    pinned = torch.from_numpy(array).pin_memory()
    host_copy(pinned, out)
    _keep(pinned)


def download(tensor: Tensor) -> Tensor:
    """Start a copy to the host. The result may be read once the device's stream has passed this point."""
    if not tensor.is_cuda:
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host_copy(tensor.contiguous(), pinned)
    _keep(pinned)
    return pinned


def _ring() -> UploadRing:
    if _pinned.ring is None:
        memory = torch.empty(_NUM_SEGMENTS * _SEGMENT_BYTES, dtype=torch.uint8, pin_memory=True)
        marks: list[torch.cuda.Event] = [torch.cuda.Event() for _ in range(_NUM_SEGMENTS)]  # type: ignore[no-untyped-call]
        _pinned.ring = UploadRing(memory.numpy(), marks)
    return _pinned.ring


def _keep(tensor: Tensor) -> None:
    in_use, unused = _pinned.in_use, _pinned.unused
    while in_use and in_use[0][0].query():  # type: ignore[no-untyped-call]
        unused.append(in_use.popleft()[0])
    passed = unused.pop() if unused else torch.cuda.Event()  # type: ignore[no-untyped-call]
    passed.record()
    in_use.append((passed, tensor))
