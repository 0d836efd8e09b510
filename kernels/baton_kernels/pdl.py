"""Programmatic dependent launch (PDL): a kernel starts while the previous one still runs, and waits inside.

A Triton kernel opts in with a constexpr `PDL` and `launch_options`:

    @triton.jit
    def kernel(..., PDL: tl.constexpr):
        ...  # addresses, and loads of what no kernel writes: weights, tables
        if PDL:
            tl.extra.cuda.gdc_wait()  # until every earlier kernel is complete and its memory visible
        ...
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()  # the stream's next kernel may start now, and wait
        ...  # the stores

    kernel[grid](..., **launch_options(x.device))

Two rules keep this safe. First, every program waits, on every path, before it reads or writes anything that an earlier
kernel touches (including scratch and outputs, whose memory is reused), so a kernel completes only after all before it.
Second, a kernel launches its dependents only after its wait, so at most two kernels are on the device.
`gdc_launch_dependents` guarantees nothing about memory; a program that exits without calling it counts as having
launched. A kernel that does not opt in starts when all before it are complete, and the next one waits for it as usual.

The launch comes late, after the last loads, for speed: the next kernel's programs are placed where there is room while
others still run, a few on one SM and none on another, and stay there. On an H200, a decode step of an 8B model at batch
8 took 4.9 ms with launches at the start of each kernel, 4.5 with late ones, 4.7 with none; at batch 1, 4.15 and 4.35.

CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"; it works within CUDA graphs too.
"""

from __future__ import annotations

import functools

import torch

_OFF = {"PDL": False}
_ON = {"PDL": True, "launch_pdl": True}


@functools.cache
def supported(device: torch.device) -> bool:
    """Hopper and later; not ROCm, and not Triton's interpreter on a CPU."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(device: torch.device) -> dict[str, bool]:
    """Keyword arguments of a kernel launch: the constexpr PDL and, where it is on, Triton's own option."""
    return _ON if supported(device) else _OFF
