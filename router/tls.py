"""TLS for the public ports, from files that are checked before anything is served."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from baton.regular_files import read_regular


class TlsError(Exception):
    """The files cannot be used; the text is one line that names the flag."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """`key` may be in `cert`'s file. `cert_reqs` is one of the `ssl.CERT_*`: whether clients must have certificates
    that `ca_certs` has signed."""

    cert: Path
    key: Path | None = None
    ca_certs: Path | None = None
    cert_reqs: int = ssl.CERT_NONE

    def context(self) -> ssl.SSLContext:
        """For HTTP. Raises TlsError."""
        for flag, path in (("certfile", self.cert), ("keyfile", self.key), ("ca-certs", self.ca_certs)):
            if path is not None:
                _read(flag, path)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.cert, self.key, password=_no_password)
        except (ssl.SSLError, ValueError) as error:
            pair = f"--ssl-certfile, --ssl-keyfile: {self.cert} and {self.key or 'the key in it'} cannot be used"
            raise TlsError(f"{pair}: {getattr(error, 'reason', None) or error}") from None
        if self.ca_certs is not None:
            try:
                context.load_verify_locations(self.ca_certs)
            except ssl.SSLError as error:
                raise TlsError(f"--ssl-ca-certs: {self.ca_certs} holds no certificates: {error.reason}") from None
        context.verify_mode = ssl.VerifyMode(self.cert_reqs)
        return context

    def credentials(self) -> grpc.ServerCredentials:
        """For gRPC, which asks clients for certificates only if they are required. Raises TlsError."""
        key, cert = _read("keyfile", self.key or self.cert), _read("certfile", self.cert)
        required = self.cert_reqs == ssl.CERT_REQUIRED
        roots = _read("ca-certs", self.ca_certs) if self.ca_certs and required else None
        return grpc.ssl_server_credentials([(key, cert)], roots, required)


def _read(flag: str, path: Path) -> bytes:
    try:
        return read_regular(path)
    except OSError as error:
        raise TlsError(f"--ssl-{flag}: cannot read {path}: {error.strerror}") from None


def _no_password() -> str:
    """Given to OpenSSL so that it does not ask on the terminal."""
    raise ValueError("the key is encrypted")
