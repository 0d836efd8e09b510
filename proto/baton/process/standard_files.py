"""stdin, stdout and stderr of a command that may be started without them, as by `baton-router >&- 2>&-` or a daemon."""

from __future__ import annotations

import os
import sys


def open_standard_files() -> None:
    """Open those that the process lacks on /dev/null, before it opens anything else: a socket would get their numbers,
    and libraries write to these and close them."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)
    os.close(opened)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115 (as long as we live)
