"""Plain TCP streams between the two ends, the ceiling of transports over sockets; and the offset of their clocks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from baton.address import HostPort
from baton.rpc.cluster_secret import ClusterSecret
from deploy.doctor.transfer.control import Control, TestFailed, dial

NUM_STREAMS = 4
STREAM_S = 0.5
"""Per stream, after as long a start that does not count."""
_PIECE_BYTES = 1 << 20
_NUM_TRIPS = 11


def clock_offset(control: Control) -> tuple[float, float]:
    """How far the other end's clock is ahead of this one's, and the round trip that showed it, in seconds. Of several
    round trips the shortest counts: it leaves least to chance."""
    best_s, ahead_s = float("inf"), 0.0
    for _ in range(_NUM_TRIPS):
        wall, began = time.time(), time.perf_counter()
        control.say(clock=True)
        theirs = control.hear().get("clock")
        took_s = time.perf_counter() - began
        if not isinstance(theirs, int | float):
            raise TestFailed("the other end does not tell its time")
        if took_s < best_s:
            best_s, ahead_s = took_s, theirs - (wall + took_s / 2)
    return ahead_s, best_s


def answer_clock(control: Control, clock: Callable[[], float]) -> None:
    """Until the other end hangs up."""
    try:
        while control.hear():
            control.say(clock=clock())
    except TestFailed:
        return


def measure(peer: HostPort, secret: ClusterSecret | None, timeout_s: float) -> float:
    """GB/s of NUM_STREAMS streams to the peer together. Raises TestFailed."""
    controls = []
    try:
        controls = [dial(peer, "stream", secret, timeout_s) for _ in range(NUM_STREAMS)]
        threads = [threading.Thread(target=_pour, args=(control,), daemon=True) for control in controls]
        for thread in threads:
            thread.start()
        return sum(float(control.hear().get("bytes_per_s", 0.0)) for control in controls) / 1e9
    finally:
        for control in controls:
            control.close()


def _pour(control: Control) -> None:
    """Send until the other end has heard enough and hangs up."""
    piece = memoryview(bytes(_PIECE_BYTES))
    try:
        while time.monotonic() < control.deadline:
            control.socket.sendall(piece)
    except OSError:
        return


def answer_stream(control: Control) -> None:
    """Read for a while, and say how fast it came."""
    buffer = bytearray(_PIECE_BYTES)
    _read_for_a_while(control, buffer)
    began = time.monotonic()
    num_bytes = _read_for_a_while(control, buffer)
    control.say(bytes_per_s=num_bytes / (time.monotonic() - began))


def _read_for_a_while(control: Control, buffer: bytearray) -> int:
    num_bytes, end = 0, time.monotonic() + STREAM_S
    while (left_s := end - time.monotonic()) > 0:
        control.socket.settimeout(left_s)
        try:
            num_read = control.socket.recv_into(buffer)
        except TimeoutError:
            break
        except OSError as error:
            raise TestFailed(f"the connection broke: {error}") from None
        if not num_read:
            raise TestFailed("the other end hung up")
        num_bytes += num_read
    return num_bytes
