"""Copies small arrays of numbers between the host and a device, without waiting for either.

On a GPU, a kernel reads or writes pinned memory, which is kept here until the kernel is done. Engine's thread only.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton_kernels.host_copy import host_copy

_IN_USE: deque[tuple[torch.cuda.Event, Tensor]] = deque()
"""Pinned tensors, each with the event after which the device does not need it any more."""


def upload(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """The array on the device. On a CPU it is the array itself."""
    host = torch.from_numpy(array)
    if device.type != "cuda":
        return host
    out = torch.empty(host.shape, dtype=host.dtype, device=device)
    upload_to(out, array)
    return out


def upload_to(out: Tensor, array: NDArray[np.generic]) -> None:
    """Overwrite `out`, which has the same size and is on a GPU, with the array."""
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


def _keep(pinned: Tensor) -> None:
    while _IN_USE and _IN_USE[0][0].query():  # type: ignore[no-untyped-call]
        _IN_USE.popleft()
    passed = torch.cuda.Event()  # type: ignore[no-untyped-call]
    passed.record()
    _IN_USE.append((passed, pinned))
