"""The limit on files and sockets that this process may have open."""

from __future__ import annotations

import resource

_NEEDED = 128
"""A node of one rank has some 60 open as soon as one peer is connected. What libraries then cannot open, gRPC for one,
may end the process without a word."""
_ENOUGH = 2**20
"""For processes without a limit: Linux's default ceiling (`fs.nr_open`)."""


def why_too_few(limit: int) -> str | None:
    """Why no process of baton can work with that limit. None: it can."""
    if limit >= _NEEDED:
        return None
    return f"open files: a limit of {limit} is too low, {_NEEDED} are needed at least (ulimit -n)"


def max_open_files() -> int:
    """The current soft limit; if there is none, what is enough."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _ENOUGH if soft == resource.RLIM_INFINITY else soft


def raise_open_files() -> int:
    """Raise the soft limit, which is 1,024 in most shells, to the hard one. Returns the resulting limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):  # a container may forbid it; the soft limit then stays
            return soft
    return wanted
