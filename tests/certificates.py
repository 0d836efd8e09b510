"""Certificates for tests, made by the openssl command."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Certificate:
    """Files of a key and its certificate, and of the authority that signed it."""

    keyfile: Path
    certfile: Path
    ca_certs: Path

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "cluster_ssl_keyfile": self.keyfile,
            "cluster_ssl_certfile": self.certfile,
            "cluster_ssl_ca_certs": self.ca_certs,
        }


def make_certificate(folder: Path, authority: str = "ours", names: str = "IP:127.0.0.1,DNS:localhost") -> Certificate:
    """Signed by the authority of that name, which is made when it is new in the folder."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl command to make certificates with")
    key, cert = folder / f"{authority}-ca.key", folder / f"{authority}-ca.pem"
    if not cert.exists():
        own = ("-days", "2", "-subj", f"/CN={authority}", "-addext", _SIGNS)
        _openssl("req", "-x509", *_NEW_KEY, "-keyout", key, "-out", cert, *own)
    made = Certificate(folder / f"{authority}.key", folder / f"{authority}.pem", cert)
    request, extensions = folder / "request.pem", folder / "extensions"
    extensions.write_text(f"subjectAltName={names}\nsubjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n")
    _openssl("req", "-new", *_NEW_KEY, "-keyout", made.keyfile, "-out", request, "-subj", "/CN=node")
    signing = ("-CA", cert, "-CAkey", key, "-CAcreateserial", "-days", "2", "-extfile", extensions)
    _openssl("x509", "-req", "-in", request, "-out", made.certfile, *signing)
    return made


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_SIGNS = "keyUsage=critical,keyCertSign,cRLSign"
"""Without it, and without key identifiers, clients from Python 3.13 on refuse the certificate (VERIFY_X509_STRICT)."""


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)
