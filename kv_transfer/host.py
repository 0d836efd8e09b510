"""This machine: which it is, and where others reach it."""

from __future__ import annotations

import fcntl
import socket
import struct
from pathlib import Path

from baton.errors import TransferError

_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_IPV6 = Path("/proc/net/if_inet6")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_RDMA = Path("/sys/class/infiniband")


def boot_id() -> str:
    """Of this machine since it started; the same in all its containers."""
    return _BOOT.read_text().strip()


def rdma_devices() -> tuple[str, ...]:
    return tuple(sorted(path.name for path in _RDMA.iterdir())) if _RDMA.exists() else ()


def network_interfaces() -> tuple[str, ...]:
    return tuple(name for _, name in socket.if_nameindex())


def hosts_of(interface: str | None) -> tuple[str, ...]:
    """Addresses of this machine: those of `interface` when it is a network interface, else, for None or an RDMA device,
    all. Raises TransferError when it is neither."""
    names = network_interfaces()
    if interface is not None and interface.partition(":")[0] not in names + rdma_devices():
        raise TransferError(f"there is no network interface {interface}")
    chosen = (interface,) if interface in names else names
    found = [host for name in chosen if (host := _ipv4(name))]
    return tuple(found + _ipv6(chosen))


def _ipv4(interface: str) -> str | None:
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            return socket.inet_ntoa(fcntl.ioctl(any_socket, _GET_ADDRESS, request)[20:24])
        except OSError:  # it has none
            return None


def _ipv6(interfaces: tuple[str, ...]) -> list[str]:
    """Global addresses, and the loopback's: link-local ones mean nothing elsewhere."""
    found = []
    for line in _IPV6.read_text().splitlines() if _IPV6.exists() else []:
        digits, _, _, scope, _, name = line.split()
        if name in interfaces and scope in ("00", "10"):
            found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found
