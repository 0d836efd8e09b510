"""Access to a node's admin pages: for clients with the admin key or, if none is set, for those on the same machine."""

from __future__ import annotations

import hmac
import ipaddress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from baton.regular_files import read_regular

_HOW = "give it one with --admin-key-file, and send it as 'Authorization: Bearer KEY'"


@dataclass(frozen=True, slots=True)
class Denied:
    """Why access is denied; `http_status` and `grpc_status` are equivalent."""

    http_status: HTTPStatus
    grpc_status: str
    reason: str


@dataclass(frozen=True, slots=True)
class AdminGate:
    """`key_file` is read for each request, so that the key can be changed while the process runs."""

    key_file: Path | None = None

    def denies(self, host: str, authorization: str | None) -> Denied | None:
        """None grants access. host: the peer's address, empty if unknown; authorization: its header, or None."""
        if self.key_file is None:
            if is_loopback(host):
                return None
            reason = f"this page is for clients on the node's own machine, as the node has no admin key: {_HOW}"
            return Denied(HTTPStatus.FORBIDDEN, "PERMISSION_DENIED", reason)
        try:
            key = read_key(self.key_file)
        except ValueError as error:
            return Denied(HTTPStatus.FORBIDDEN, "PERMISSION_DENIED", f"the node has lost its admin key: {error}")
        said = (authorization or "").encode(errors="replace")
        if hmac.compare_digest(said, b"Bearer " + key):
            return None
        return Denied(HTTPStatus.UNAUTHORIZED, "UNAUTHENTICATED", "send the admin key as 'Authorization: Bearer KEY'")


def read_key(path: Path) -> bytes:
    """The file's content without surrounding white space. Raises ValueError if it is empty or cannot be read."""
    try:
        key = read_regular(path).strip()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    if not key:
        raise ValueError(f"{path} is empty")
    return key


def is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)  # how a dual-stack socket shows an IPv4 client
    return bool((mapped or address).is_loopback)
