"""Which signals ask a process to finish what runs and end."""

from __future__ import annotations

import signal


def stop_signals() -> tuple[signal.Signals, ...]:
    """SIGTERM, SIGINT, and SIGHUP unless whoever started the process had it ignored, as nohup does."""
    wanted = (signal.SIGTERM, signal.SIGINT)
    return wanted if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*wanted, signal.SIGHUP)
