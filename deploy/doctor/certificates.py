"""The dates of certificates. Python's ssl reads those of a connected peer only, so the few fields are read here."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import NamedTuple

_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
_VERSION, _UTC_TIME = 0xA0, 0x17


class Validity(NamedTuple):
    begin: datetime
    end: datetime


def validities(pem: str) -> list[Validity]:
    """Of each certificate in the text, in order. Raises ValueError if there is none, or one is damaged."""
    found = []
    for piece in pem.split(_BEGIN)[1:]:
        body, end, _ = piece.partition(_END)
        if not end:
            raise ValueError("a certificate is cut off")
        try:
            found.append(_validity(ssl.PEM_cert_to_DER_cert(f"{_BEGIN}{body}{_END}")))
        except (ValueError, LookupError) as error:
            raise ValueError(f"a certificate is damaged: {error}") from None
    if not found:
        raise ValueError("there is no certificate")
    return found


def _validity(der: bytes) -> Validity:
    """Certificate -> TBSCertificate -> version (optional), serial, signature, issuer, validity (RFC 5280, 4.1)."""
    certificate = next(_fields(der))[1]
    fields = [*_fields(next(_fields(certificate))[1])]
    if fields[0][0] == _VERSION:
        fields = fields[1:]
    begin, end = _fields(fields[3][1])
    return Validity(_time(*begin), _time(*end))


def _fields(der: bytes) -> Iterator[tuple[int, bytes]]:
    """The tag and the content of each value in turn."""
    at = 0
    while at < len(der):
        tag, length, at = der[at], der[at + 1], at + 2
        if length >= 0x80:
            num_bytes = length - 0x80
            length, at = int.from_bytes(der[at : at + num_bytes]), at + num_bytes
        if at + length > len(der):
            raise ValueError("it is cut off")
        yield tag, der[at : at + length]
        at += length


def _time(tag: int, content: bytes) -> datetime:
    text = content.decode("ascii")
    if tag == _UTC_TIME:  # two digits of the year, 1950 to 2049
        text = ("20" if int(text[:2]) < 50 else "19") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)
