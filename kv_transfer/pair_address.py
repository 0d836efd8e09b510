"""Where a transport that talks over TCP is found: its name, its port and the addresses of this machine."""

from __future__ import annotations

import fcntl
import hashlib
import json
import socket
import struct
from dataclasses import asdict, dataclass
from pathlib import Path

from baton.errors import TransferError

_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_MAGIC = b"BTNC"
_SUM_BYTES = 16
_IPV6 = Path("/proc/net/if_inet6")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class PairAddress:
    """`id` names one transport of one process; `kind` and `version` say what it speaks, `boot` on which machine."""

    id: str
    kind: str
    version: str
    boot: str
    hosts: tuple[str, ...]
    port: int

    def pack(self) -> bytes:
        data = json.dumps(asdict(self)).encode()
        return _MAGIC + _checksum(data) + data

    @classmethod
    def unpack(cls, address: bytes, who: str) -> PairAddress:
        """What `pack` made at `who`. Raises TransferError when it is damaged."""
        data = address[len(_MAGIC) + _SUM_BYTES :]
        if address[: len(_MAGIC) + _SUM_BYTES] != _MAGIC + _checksum(data):
            raise TransferError(f"the address of {who} is damaged, or of another transport")
        fields = json.loads(data)
        return cls(**fields | {"hosts": tuple(fields["hosts"])})

    def require_like(self, mine: PairAddress, who: str) -> None:
        """Raise TransferError unless both speak the same."""
        if (self.kind, self.version) != (mine.kind, mine.version):
            raise TransferError(f"{mine.kind} {mine.version} != {self.kind} {self.version} of {who}")

    def reachable_from(self, mine: PairAddress) -> tuple[str, ...]:
        """Addresses worth trying: those of its loopback only on the same machine, and then first."""
        if self.boot == mine.boot:
            return tuple(sorted(self.hosts, key=lambda host: not _is_loopback(host)))
        return tuple(host for host in self.hosts if not _is_loopback(host))


def hosts_of(interface: str | None) -> tuple[str, ...]:
    """Addresses of this machine: those of `interface` when it is a network interface, else all."""
    names = [name for _, name in socket.if_nameindex()]
    chosen = [interface] if interface in names else names
    found = [host for name in chosen if (host := _ipv4(name))]
    return tuple(found + _ipv6(chosen))


def boot_id() -> str:
    """Of this machine since it started; the same in all its containers."""
    return _BOOT.read_text().strip()


def _ipv4(interface: str) -> str | None:
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            return socket.inet_ntoa(fcntl.ioctl(any_socket, _GET_ADDRESS, request)[20:24])
        except OSError:  # it has none
            return None


def _ipv6(interfaces: list[str]) -> list[str]:
    """Global addresses, and the loopback's: link-local ones mean nothing elsewhere."""
    found = []
    for line in _IPV6.read_text().splitlines() if _IPV6.exists() else []:
        digits, _, _, scope, _, name = line.split()
        if name in interfaces and scope in ("00", "10"):
            found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found


def _is_loopback(host: str) -> bool:
    return host.startswith("127.") or host == "::1"


def _checksum(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:_SUM_BYTES]
