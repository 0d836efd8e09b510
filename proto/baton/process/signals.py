"""The signals that ask a process to finish its work and exit."""

from __future__ import annotations

import os
import signal


def stop_signals() -> tuple[signal.Signals, ...]:
    """SIGTERM, SIGINT, and SIGHUP unless the process was started with it ignored, as by nohup."""
    wanted = (signal.SIGTERM, signal.SIGINT)
    return wanted if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*wanted, signal.SIGHUP)


def end_at_signals() -> None:
    """Have a stop signal end this process at once, until it is handled otherwise. The kernel does that by itself, but
    for a container's first process: it keeps signals from it that it has no handler for (man pid_namespaces), and kills
    it when its grace period is over."""
    if os.getpid() != 1:
        return
    for number in stop_signals():
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda number, _: os._exit(128 + number))
