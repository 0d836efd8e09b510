"""Programmatic dependent launch: a kernel starts while the one before it still runs, and waits inside.

A Triton kernel takes part by a constexpr `PDL` and the launch options of `launch_options`:

    @triton.jit
    def kernel(..., PDL: tl.constexpr):
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()  # the next kernel of the stream may start now, and wait
            tl.extra.cuda.gdc_wait()  # until every earlier kernel is complete and its memory visible
        ...

    kernel[grid](..., **launch_options(x.device))

Two rules keep it safe. EVERY program waits, on every path, before it reads or writes anything that an earlier kernel
touches (scratch and outputs too: their memory is reused), so that a complete kernel means that all before it are. What
comes before the wait may only read what no kernel writes: weights, tables. `gdc_launch_dependents` says nothing about
memory: called early it lets the next kernel's programs be resident beside ours, and costs their registers and shared
memory. A kernel that does not take part is a full barrier on both sides.

CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"; it works within CUDA graphs too, where
it hides one to two microseconds per kernel.
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
    """Keyword arguments of a kernel's launch: the constexpr PDL and, where it is on, Triton's own option."""
    return _ON if supported(device) else _OFF
