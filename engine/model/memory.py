"""How much of a GPU is left for KV blocks: one measured step, and arithmetic.

    share = total x --gpu-memory-utilization
          = weights + libraries + one step's activations + CUDA graphs + staging slots + KV pool

The share is this process's. What other processes hold on the same GPU matters only if they leave less than the share.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from engine.config import MIN_MODEL_LEN, EngineConfig

GIB = 1024**3
_CONTEXT_BYTES = GIB
"""The most that a process's CUDA context takes, which cannot be told apart from the memory of other processes."""
_MOST_LIBRARIES_BYTES = 2 * GIB


@dataclass(frozen=True, slots=True)
class ProfiledMemory:
    """A GPU's memory, in bytes, as measured with the largest steps.

    total: all memory of the GPU. free: what is free after the steps, with the weights loaded and the steps' own memory
    freed. weights: what torch has allocated permanently. libraries: what the steps made other libraries allocate
    permanently (kernels' code, cuBLAS). activations: the steps' peak above the weights.
    """

    total: int
    free: int
    weights: int
    libraries: int
    activations: int


def profile(run: Callable[[], None], device: torch.device, scratch_bytes: int = 0) -> ProfiledMemory:
    """Measure `run`, which computes the largest possible steps.

    scratch_bytes: the part of the memory allocated now that only `run` needs and that will be freed (its KV blocks).
    """
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    allocated = torch.cuda.memory_allocated(device)
    outside = _outside_torch(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return ProfiledMemory(
        total=total,
        free=free,  # the scratch memory is still allocated
        weights=allocated - scratch_bytes,
        libraries=grown_by_libraries(outside, _outside_torch(device)),
        activations=peak - allocated,
    )


def grown_by_libraries(before: int, after: int) -> int:
    """How much memory libraries took for a step, given the memory used outside of torch before and after it. Anything
    beyond what they can take belongs to another process that started on the same GPU at the same time."""
    return min(max(0, after - before), _MOST_LIBRARIES_BYTES)


def kv_pool_bytes(memory: ProfiledMemory, utilization: float, kept_bytes: int) -> int:
    """Bytes for KV blocks. utilization: this process's share of the GPU. kept_bytes: for CUDA graphs and staging slots.

    Raises ValueError, naming the flag, when the share is used up or other processes on the GPU leave less than it.
    """
    share = int(memory.total * utilization)
    own = memory.weights + memory.libraries
    pool = share - own - memory.activations - kept_bytes
    available = memory.free - memory.activations - kept_bytes
    used = (
        f"weights {_size(memory.weights)}, libraries {_size(memory.libraries)}, "
        f"a step's activations {_size(memory.activations)}, CUDA graphs and slots {_size(kept_bytes)}"
    )
    if pool <= 0:
        raise ValueError(
            f"--gpu-memory-utilization: {utilization:g} of {_size(memory.total)} leaves nothing for KV blocks "
            f"({used}): raise it, or lower --max-num-batched-tokens or --max-num-seqs"
        )
    if available < pool - _CONTEXT_BYTES:
        others = memory.total - memory.free - own
        raise ValueError(
            f"--gpu-memory-utilization: {utilization:g} of {_size(memory.total)} is {_size(share)}, but others hold "
            f"{_size(others)} of this GPU: lower it to {math.floor(100 * (memory.free + own) / memory.total) / 100}, "
            "or end what else runs there"
        )
    return min(pool, available)


def num_kv_blocks(pool_bytes: int, block_bytes: int, limits: EngineConfig, more_by: str) -> int:
    """How many KV blocks fit in `pool_bytes`. more_by: the flag that would provide more, with its value.

    Raises ValueError when they cannot hold one request of max_model_len tokens.
    """
    num_blocks, max_model_len = pool_bytes // block_bytes, limits.max_model_len
    needed = limits.most_blocks(max_model_len)
    shortest = limits.most_blocks(MIN_MODEL_LEN)
    if num_blocks < shortest:
        raise ValueError(
            f"--block-size: a request takes {_size(shortest * block_bytes)} of KV blocks, even a short one, as a block "
            f"has {limits.block_size} tokens, and there are {_size(pool_bytes)}: lower it, or raise {more_by}"
        )
    if num_blocks < needed:
        fitting = bisect.bisect_right(range(max_model_len), num_blocks, key=limits.most_blocks) - 1
        raise ValueError(
            f"--max-model-len: a request of {max_model_len} tokens takes {_size(needed * block_bytes)} of KV blocks, "
            f"and there are {_size(pool_bytes)}: lower it to {fitting} or less, or raise {more_by}"
        )
    return num_blocks


_HOST_ALLOCATOR = "DefaultCPUAllocator"
"""Marks out-of-memory errors of the host, which have no class of their own."""


@contextmanager
def out_of_memory(advice: str) -> Iterator[None]:
    """Turns MemoryError, and torch's out-of-memory error for a GPU or the host, into a ValueError of one line: the
    advice, and the first line of the message."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        is_known = isinstance(error, MemoryError | torch.OutOfMemoryError) or _HOST_ALLOCATOR in str(error)
        if not is_known:
            raise
        raise ValueError(f"{advice}: {str(error).splitlines()[0]}") from error


def _outside_torch(device: torch.device) -> int:
    """Bytes of the GPU in use outside of torch's allocator: contexts, libraries, other processes."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / 1024:.0f} KiB"
