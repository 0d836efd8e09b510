"""TLS for the public ports, from files that are checked before anything is served, and read again when they change."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from baton.regular_files import read_regular
from baton.renewed import Renewed
from baton.rpc.channels import Tls, server_credentials


class TlsError(ValueError):
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
        """For HTTP. Each handshake is by the current files. Raises TlsError."""
        contexts = Renewed(self._paths(), self._new_context)
        first = contexts.current()

        def take_current(connection: ssl.SSLSocket | ssl.SSLObject, _name: str | None, _first: ssl.SSLContext) -> None:
            connection.context = contexts.current()

        first.sni_callback = take_current  # called also for clients that name no host
        return first

    def credentials(self) -> grpc.ServerCredentials:
        """For gRPC likewise, which asks clients for certificates only if they are required. Raises TlsError."""
        return server_credentials(Renewed(self._paths(), self._pem), self.cert_reqs == ssl.CERT_REQUIRED)

    def _paths(self) -> tuple[Path, ...]:
        return tuple(path for path in (self.cert, self.key, self.ca_certs) if path is not None)

    def _new_context(self) -> ssl.SSLContext:
        """Raises TlsError."""
        for flag, path in (("certfile", self.cert), ("keyfile", self.key), ("ca-certs", self.ca_certs)):
            if path is not None:
                _read(flag, path)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.cert, self.key, password=_no_password)
        except (OSError, ValueError) as error:
            pair = f"--ssl-certfile, --ssl-keyfile: {self.cert} and {self.key or 'the key in it'} cannot be used"
            raise TlsError(f"{pair}: {getattr(error, 'reason', None) or error}") from None
        if self.ca_certs is not None:
            try:
                context.load_verify_locations(self.ca_certs)
            except OSError as error:
                reason = getattr(error, "reason", None) or error
                raise TlsError(f"--ssl-ca-certs: {self.ca_certs} holds no certificates: {reason}") from None
        context.verify_mode = ssl.VerifyMode(self.cert_reqs)
        return context

    def _pem(self) -> Tls:
        """Raises TlsError, also for files that OpenSSL would refuse."""
        key, cert = _read("keyfile", self.key or self.cert), _read("certfile", self.cert)
        required = self.cert_reqs == ssl.CERT_REQUIRED
        roots = _read("ca-certs", self.ca_certs) if self.ca_certs and required else None
        self._new_context()
        return Tls(key, cert, roots)


def _read(flag: str, path: Path) -> bytes:
    try:
        return read_regular(path)
    except OSError as error:
        raise TlsError(f"--ssl-{flag}: cannot read {path}: {error.strerror}") from None


def _no_password() -> str:
    """Given to OpenSSL so that it does not ask on the terminal."""
    raise ValueError("the key is encrypted")
