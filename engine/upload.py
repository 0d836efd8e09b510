"""Small arrays of numbers from the host to a device, without waiting for either."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """The array on the device: on a GPU by way of pinned memory, which its allocator keeps until the copy is done. On a
    CPU it is the array itself."""
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def download(tensor: Tensor) -> Tensor:
    """Begin to copy to the host. What it returns may be read once the device's stream has come past this point."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
