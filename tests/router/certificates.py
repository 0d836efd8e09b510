"""Certificates for tests: an authority, and what it has signed for this machine."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Certificates:
    """`ca` signs, `cert` with `key` is for 127.0.0.1 and localhost, to serve and to ask with."""

    folder: Path

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def cert(self) -> Path:
        return self.folder / "cert.pem"

    @property
    def key(self) -> Path:
        return self.folder / "key.pem"


def make_certificates(folder: Path) -> Certificates:
    """With the `openssl` command, valid for a day. Key usage and key identifiers are there because clients from Python
    3.13 on refuse certificates without them (VERIFY_X509_STRICT)."""
    folder.mkdir(exist_ok=True)
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1")
    authority = ("-subj", "/CN=authority", "-addext", "basicConstraints=critical,CA:TRUE")
    signs = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")
    _openssl(folder, "req", "-x509", *curve, *authority, *signs, "-keyout", "ca.key", "-out", "ca.pem")
    names = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
    leaf = ("-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "basicConstraints=critical,CA:FALSE")
    _openssl(folder, "req", "-x509", *curve, *names, *leaf, "-keyout", "key.pem", "-out", "cert.pem")
    return Certificates(folder)


def encrypt_key(certificates: Certificates) -> Path:
    _openssl(certificates.folder, "ec", "-in", "key.pem", "-aes128", "-passout", "pass:x", "-out", "locked.pem")
    return certificates.folder / "locked.pem"


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)
