"""The start of a supervisor's child: `python -m deploy.child PARENT_PID MODULE ARGUMENT...`.

It has the kernel kill it when its parent dies for whatever reason, and then runs MODULE. The kernel watches the thread
that started the child, so the supervisor starts children from its main thread. (Doing this between fork and exec
instead would run Python in a forked copy of a process with threads.)
"""

from __future__ import annotations

import runpy
import sys

from baton.process.parent import die_with


def main() -> None:
    parent, module = int(sys.argv[1]), sys.argv[2]
    if not die_with(parent):
        return
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
