"""reduce_rms_norm in separate steps, and waits by polling."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from baton_kernels.rms_norm import reference

TIMEOUT_S = 60.0


def reduce_rms_norm(
    parts: tuple[Tensor, Tensor, Tensor, int],
    weight: Tensor,
    eps: float,
    out: Tensor,
    residual: Tensor | None,
    weight_offset: float,
    round_once: bool,
) -> None:
    own, received, arrived, rank = parts
    until_set(arrived)
    size = len(received) + 1
    total = torch.zeros_like(own, dtype=torch.float32)
    for other in range(size):
        total += (own if other == rank else received[(other - rank) % size - 1]).float()
    out.copy_(reference.rms_norm(total.to(own.dtype), weight, eps, residual, weight_offset, round_once))


def wait_for_flags(first: Tensor, second: Tensor) -> None:
    until_set(first, second)
    first.zero_()
    second.zero_()


def until_set(*flags: Tensor) -> None:
    """Wait until no element is 0. Raises TimeoutError."""
    deadline = time.monotonic() + TIMEOUT_S
    while not all(bool(flag.all()) for flag in flags):
        if time.monotonic() > deadline:
            raise TimeoutError("another rank has sent nothing")
        time.sleep(0)
