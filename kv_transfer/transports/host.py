"""This machine: its identity, and the addresses at which others reach it."""

from __future__ import annotations

import fcntl
import ipaddress
import logging
import os
import socket
import struct
from pathlib import Path

from baton.errors import TransferError

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"

_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_IPV6 = Path("/proc/net/if_inet6")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_RDMA = Path("/sys/class/infiniband")


def boot_id() -> str:
    """Identifies this boot of this machine; the same in all its containers."""
    return _BOOT.read_text().strip()


def rdma_devices() -> tuple[str, ...]:
    return tuple(sorted(path.name for path in _RDMA.iterdir())) if _RDMA.exists() else ()


def network_interfaces() -> tuple[str, ...]:
    return tuple(name for _, name in socket.if_nameindex())


def hosts_of(interface: str | None) -> tuple[str, ...]:
    """Addresses of this machine: those of `interface` if it is a network interface; all for None or an RDMA device.
    Raises TransferError for anything else."""
    names = network_interfaces()
    if interface is not None and interface.partition(":")[0] not in names + rdma_devices():
        raise TransferError(f"there is no network interface {interface}")
    chosen = (interface,) if interface in names else names
    found = [host for name in chosen if (host := _ipv4(name))]
    return tuple(found + _ipv6(chosen))


def address_of(host: str, interface: str | None = None) -> str | None:
    """The numeric address to listen on: the first one of `interface` if that is a network interface, else the host's.
    None: all addresses of this machine. Raises TransferError."""
    if interface in network_interfaces():
        if not (found := hosts_of(interface)):
            raise TransferError(f"network interface {interface} has no address")
        return found[0]
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise TransferError(f"{host} has no address: {error}") from None
    return None if ipaddress.ip_address(address).is_unspecified else address


def listen_on(address: str | None) -> socket.socket:
    """Listen on a free port; None: on all addresses. Raises TransferError."""
    both = address is None and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in (address or "") else socket.AF_INET
    try:
        return socket.create_server((address or "", 0), family=family, backlog=128, dualstack_ipv6=both)
    except OSError as error:
        raise TransferError(f"cannot listen on {address or 'any address'}: {error}") from None


def interface_of(address: str) -> str | None:
    """The network interface that has that address. None: none was found."""
    if ipaddress.ip_address(address).is_loopback:
        return "lo"
    return next((name for name in network_interfaces() if address in hosts_of(name)), None)


def net_devices(host: str, interface: str | None = None) -> str | None:
    """The devices for UCX, as in UCX_NET_DEVICES: `interface`, or the interface with the address of `host` and the RDMA
    devices, which have addresses of their own. None: UCX_NET_DEVICES, or all if it is unset. Raises TransferError."""
    if interface is not None or "UCX_NET_DEVICES" in os.environ or (address := address_of(host)) is None:
        return interface
    chosen = interface_of(address)
    if chosen is None:
        log.warning("KV blocks go over all network interfaces: none is found that has %s, --listen", address)
    elif rdma_devices() and chosen != "lo":
        return "^" + ",".join(name for name in network_interfaces() if name != chosen)
    return chosen


def _ipv4(interface: str) -> str | None:
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            return socket.inet_ntoa(fcntl.ioctl(any_socket, _GET_ADDRESS, request)[20:24])
        except OSError:  # the interface has no IPv4 address
            return None


def _ipv6(interfaces: tuple[str, ...]) -> list[str]:
    """Global addresses and the loopback's; link-local ones mean nothing on other machines."""
    found = []
    for line in _IPV6.read_text().splitlines() if _IPV6.exists() else []:
        digits, _, _, scope, _, name = line.split()
        if name in interfaces and scope in ("00", "10"):
            found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found
