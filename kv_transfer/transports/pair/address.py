"""The address of a transport that uses TCP: its id, its port and the addresses of its machine."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
from dataclasses import asdict, dataclass

from baton.errors import TransferError

_MAGIC = b"BTNC"
_SUM_BYTES = 16
_MOST_BYTES = 64 << 10
MOST_HOSTS = 64
"""The most addresses of a machine; each of them is dialled."""
_ID = re.compile(r"[0-9a-f]{32}")
_HEX = re.compile(r"(?:[0-9a-f]{2})*")


@dataclass(frozen=True, slots=True)
class PairAddress:
    """`id` identifies one transport of one process, `kind` and `version` its protocol, `boot` its machine. `memory` (in
    hexadecimal digits) is what its carrier publishes to the carriers of peers."""

    id: str
    kind: str
    version: str
    boot: str
    hosts: tuple[str, ...]
    port: int
    memory: str = ""

    def pack(self) -> bytes:
        data = json.dumps(asdict(self)).encode()
        return _MAGIC + _checksum(data) + data

    @classmethod
    def unpack(cls, address: bytes, who: str) -> PairAddress:
        """Unpack what `pack` made at `who`. Raises TransferError when it is damaged or invalid. The checksum detects
        damage; it does not authenticate the sender."""
        data = address[len(_MAGIC) + _SUM_BYTES :]
        if address[: len(_MAGIC) + _SUM_BYTES] != _MAGIC + _checksum(data) or len(data) > _MOST_BYTES:
            raise TransferError(f"the address of {who} is damaged, or of another transport")
        try:
            fields = json.loads(data)
            made = cls(**fields | {"hosts": tuple(fields["hosts"])})
            made._check()
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise TransferError(f"the address of {who} makes no sense: {error}") from None
        return made

    def _check(self) -> None:
        """Raises ValueError or TypeError."""
        if not all(isinstance(text, str) for text in (self.kind, self.version, self.boot, *self.hosts)):
            raise TypeError("a text is none")
        if not _ID.fullmatch(self.id) or not _HEX.fullmatch(self.memory):
            raise ValueError("its name or its memory is not in hexadecimal digits")
        if type(self.port) is not int or not 0 < self.port <= 65535:
            raise ValueError("its port is none")
        if len(self.hosts) > MOST_HOSTS:
            raise ValueError(f"it has {len(self.hosts)} addresses")
        for host in self.hosts:
            if "%" in host:
                raise ValueError("a scope means nothing elsewhere")
            ipaddress.ip_address(host)

    def require_like(self, mine: PairAddress, who: str) -> None:
        """Raise TransferError unless both have the same kind and version."""
        if (self.kind, self.version) != (mine.kind, mine.version):
            raise TransferError(f"{mine.kind} {mine.version} != {self.kind} {self.version} of {who}")

    def reachable_from(self, mine: PairAddress) -> tuple[str, ...]:
        """Addresses worth trying: loopback addresses only if both are on the same machine, and then first."""
        if self.boot == mine.boot:
            return tuple(sorted(self.hosts, key=lambda host: not _is_loopback(host)))
        return tuple(host for host in self.hosts if not _is_loopback(host))


def _is_loopback(host: str) -> bool:
    return host.startswith("127.") or host == "::1"


def _checksum(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:_SUM_BYTES]
