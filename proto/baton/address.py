"""Addresses of the form HOST:PORT, as used in flags and in node messages."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

_MOST_HOST_BYTES = 253
"""Of a name in DNS (RFC 1035), in which a part has up to 63."""


@dataclass(frozen=True, slots=True)
class HostPort:
    """A host (name or address; IPv6 without brackets) and a TCP port. Port 0 listens on any free port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_wildcard(self) -> bool:
        """Whether the host is the wildcard address, which works for listening but not for connecting."""
        try:
            return ipaddress.ip_address(self.host).is_unspecified
        except ValueError:  # a host name
            return False

    @classmethod
    def parse(cls, text: str, allow_port_0: bool = False) -> HostPort:
        """Parse `HOST:PORT`, IPv6 as `[ADDRESS]:PORT`. Raises ValueError with the reason."""
        host, colon, port = text.strip().rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        host = host[1:-1] if bracketed else host
        if not colon or not host or any(c in " /[]" or not c.isprintable() for c in host):
            raise ValueError(f"must be HOST:PORT, not {text!r}")
        if not _can_be_looked_up(host):
            raise ValueError(f"{host!r} cannot be the name of a host")
        if ":" in host and not bracketed:
            raise ValueError(f"an IPv6 address needs brackets, as in [::1]:8000, not {text!r}")
        if not port.isdecimal() or not port.isascii() or int(port) > 65535:
            raise ValueError(f"the port must be a number up to 65535, not {port!r}")
        if not int(port) and not allow_port_0:
            raise ValueError(f"port 0 is no port to connect to: {text!r}")
        return cls(host, int(port))


def _can_be_looked_up(host: str) -> bool:
    try:
        return len(host.encode("idna").rstrip(b".")) <= _MOST_HOST_BYTES  # as each lookup of it encodes it
    except UnicodeError:
        return False
