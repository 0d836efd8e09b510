"""Checks of this machine's clocks, and of their offset from another machine's."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator

from deploy.doctor.finding import Finding, ok, skipped, warning

COARSE_S = 1e-6
MAX_OFFSET_S = 0.1
_UNSYNC = 0x40  # STA_UNSYNC
_HOW = "Run chrony or systemd-timesyncd on the host."


def findings() -> Iterator[Finding]:
    yield monotonic(time.get_clock_info("monotonic").resolution)
    yield synchronised(*clock_status())


def monotonic(resolution_s: float) -> Finding:
    text = f"The monotonic clock has a resolution of {resolution_s * 1e9:g} ns."
    if resolution_s <= COARSE_S:
        return ok("clock resolution", text)
    return warning("clock resolution", text, "Choose another clock source: latencies and deadlines are as coarse.")


class _Timex(ctypes.Structure):
    """struct timex, as far as it is read; the kernel writes 208 bytes."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("max_error", ctypes.c_long),
        ("est_error", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


def clock_status() -> tuple[bool, float] | tuple[None, float]:
    """Whether the kernel's clock is kept in step with others, and its greatest error in seconds, as the kernel says
    (`adjtimex`). None: it does not say."""
    state = _Timex()
    try:
        if ctypes.CDLL(None).adjtimex(ctypes.byref(state)) < 0:
            return None, 0.0
    except (OSError, AttributeError):
        return None, 0.0
    return not state.status & _UNSYNC, state.max_error / 1e6


def synchronised(is_synchronised: bool | None, max_error_s: float) -> Finding:
    if is_synchronised is None:
        return skipped("clock sync", "The kernel does not say whether the clock is synchronised.")
    if is_synchronised:
        return ok("clock sync", f"The clock is synchronised, to {max_error_s * 1e3:.0f} ms or better.")
    return warning("clock sync", "No time service keeps this clock in step with others.", _HOW)


def offset(offset_s: float, round_trip_s: float, peer: str) -> Finding:
    """offset_s: how far the peer's clock is ahead; right to half of the round trip."""
    text = f"The clock of {peer} is {offset_s * 1e3:+.1f} ms off, within {round_trip_s * 500:.1f} ms."
    if abs(offset_s) - round_trip_s / 2 <= MAX_OFFSET_S:
        return ok("clock offset", text)
    do = f"{_HOW} Logs and traces of the two cannot be laid beside each other, and certificates may not be valid yet."
    return warning("clock offset", text, do)
