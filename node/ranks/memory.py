"""Maps the KV pools of ranks on this host into rank 0's process."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def mapped(descriptor: int, num_bytes: int) -> Tensor:
    """The memfd's memory: [num_bytes], uint8."""
    import torch

    return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)


def mapped_from_gpu(rank: int, region: bytes, offset: int, num_bytes: int) -> Tensor:
    """A rank's memory, for this process on the rank's GPU as well; mapped until the process ends."""
    import torch

    from kv_transfer.transports.carriers.cuda_memory import CudaMemory

    memory = CudaMemory(torch.device("cuda", rank))
    with torch.cuda.device(rank):
        torch.cuda.synchronize()  # makes the device's context current
        return memory.open(region)[offset : offset + num_bytes]
