"""For a program that tests what happens without a file descriptor left."""

from __future__ import annotations

import os
import resource
import socket

NUM_CALLERS = 3
_LIMIT = 64
_PATIENCE_S = 10


def heard_without_descriptors(address: tuple[str, int]) -> list[bytes]:
    """What callers hear at an address of this process while it has no descriptor left: b"" if it hangs up. Its limit
    stays low."""
    callers = [socket.socket() for _ in range(NUM_CALLERS)]
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_LIMIT, hard))
    held, heard = [], []
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    for caller in callers:
        caller.settimeout(_PATIENCE_S)
        caller.connect(address)
        heard.append(caller.recv(1))
    for descriptor in held:
        os.close(descriptor)
    return heard
