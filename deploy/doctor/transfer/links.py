"""What the way to a peer should carry: speeds that the system states of its network interfaces and RDMA devices."""

from __future__ import annotations

import re
import socket
from pathlib import Path

from kv_transfer.transports.host import interface_of

NET = Path("/sys/class/net")
INFINIBAND = Path("/sys/class/infiniband")
_LOOPBACK = "lo"


def interface_to(connection: socket.socket) -> str | None:
    """The network interface that a connection leaves through; None: none is found."""
    return interface_of(str(connection.getsockname()[0]))


def nic_gb_s(interface: str | None) -> float | None:
    """GB/s of a network interface, as its driver states it; None: the loopback, or it does not state it."""
    if interface is None or interface == _LOOPBACK:
        return None
    try:
        megabits = int((NET / interface / "speed").read_text())
    except (OSError, ValueError):
        return None
    return megabits / 8e3 if megabits > 0 else None


def rdma_gb_s() -> float | None:
    """GB/s of the fastest active RDMA port; None: there is none."""
    rates = []
    for port in INFINIBAND.glob("*/ports/*"):
        try:
            state, rate = (port / "state").read_text(), (port / "rate").read_text()
        except OSError:
            continue
        if "ACTIVE" in state and (found := re.match(r"([\d.]+) Gb/sec", rate)):
            rates.append(float(found[1]) / 8)
    return max(rates, default=None)
