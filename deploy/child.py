"""The start of a supervisor's child: `python -m deploy.child PARENT_PID MODULE ARGUMENT...`.

It has the kernel kill it when its parent dies for whatever reason, and then runs MODULE. The kernel watches the thread
that started the child, so the supervisor starts children from its main thread. (Doing this between fork and exec
instead would run Python in a forked copy of a process with threads.)
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, module = int(sys.argv[1]), sys.argv[2]
    if not die_with(parent):
        return
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def die_with(parent: int) -> bool:
    """Have the kernel kill this process when its parent dies. False: the parent is dead already. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    return os.getppid() == parent  # else it died before the call


if __name__ == "__main__":
    main()
