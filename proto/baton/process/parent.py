"""A process that must not outlive the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> bool:
    """Have the kernel kill this process when the thread of `parent` that started it ends, also when this one is
    stopped. False: the parent is dead already. Raises OSError."""
    _have_sent(signal.SIGKILL)
    return os.getppid() == parent  # else it died before the call


def wake_with_parent() -> None:
    """Have the kernel continue this process, if it is stopped, when the thread that started it ends: so that it notices
    that, and ends by itself. Raises OSError."""
    _have_sent(signal.SIGCONT)


def _have_sent(number: signal.Signals) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
