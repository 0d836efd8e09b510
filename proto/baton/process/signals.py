"""The signals that ask a process to finish its work and exit."""

from __future__ import annotations

import signal


def stop_signals() -> tuple[signal.Signals, ...]:
    """SIGTERM, SIGINT, and SIGHUP unless the process was started with it ignored, as by nohup."""
    wanted = (signal.SIGTERM, signal.SIGINT)
    return wanted if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*wanted, signal.SIGHUP)
