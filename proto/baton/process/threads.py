"""Whether this process may start the threads that it needs."""

from __future__ import annotations

import threading

_NEEDED = 24
"""A node on a CPU has some 20 beside those that compute. A library that cannot start its own, gRPC for one, may end the
process without a word, or stand still."""


def why_too_few_threads() -> str | None:
    """Why no process of baton can work here: found out by starting some, since the user's other processes and those of
    the container count, too. None: it can."""
    end = threading.Event()
    started: list[threading.Thread] = []
    try:
        while len(started) < _NEEDED:
            thread = threading.Thread(target=end.wait)
            thread.start()
            started.append(thread)
    except RuntimeError:
        most = len(started)
        return (
            f"threads: no more than {most} can be started, {_NEEDED} are needed at least (ulimit -u, ulimit -v, pids)"
        )
    finally:
        end.set()
        for thread in started:
            thread.join()
    return None
