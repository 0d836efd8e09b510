"""The signals that ask a process to finish its work and exit."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator


def stop_signals() -> tuple[signal.Signals, ...]:
    """SIGTERM, SIGINT, and SIGHUP unless the process was started with it ignored, as by nohup."""
    wanted = (signal.SIGTERM, signal.SIGINT)
    return wanted if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*wanted, signal.SIGHUP)


@contextlib.contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Inside, each stop signal that is not ignored raises KeyboardInterrupt, as Ctrl-C does: for a command that then
    tells what it has, or leaves a terminal as it found it. For the main thread."""
    before = {number: signal.getsignal(number) for number in stop_signals()}
    heeded = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in heeded:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in heeded.items():
            signal.signal(number, handler)


def end_at_signals() -> None:
    """Have a stop signal end this process at once, until it is handled otherwise. The kernel does that by itself, but
    for a container's first process: it keeps signals from it that it has no handler for (man pid_namespaces), and kills
    it when its grace period is over."""
    if os.getpid() != 1:
        return
    for number in stop_signals():
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda number, _: os._exit(128 + number))
