"""How a process of a cluster authenticates its peers: the settings, and the secret and certificates that they name."""

from __future__ import annotations

import ipaddress
import os
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, model_validator

from baton.address import HostPort
from baton.regular_files import read_regular
from baton.renewed import Renewed
from baton.rpc.channels import Tls
from baton.rpc.cluster_secret import ClusterSecret, read_secret
from baton.settings import Settings


@dataclass(frozen=True, slots=True)
class Trust:
    """Without a secret and without TLS, any client that reaches a port is trusted."""

    secret: ClusterSecret | None = None
    tls: Renewed[Tls] | None = None


class ClusterSettings(Settings):
    """Settings that all roles share."""

    cluster_secret_file: Path | None = Field(
        None,
        description="file with a secret of 16 bytes or more, the same on all nodes and routers, which prove to each "
        "other that they know it before anything else is said; unset: whoever reaches a node is believed",
    )
    cluster_ssl_keyfile: Path | None = Field(
        None, description="PEM file with the private key for gRPC between nodes and routers; unset: no TLS there"
    )
    cluster_ssl_certfile: Path | None = Field(
        None,
        description="PEM file with the certificate of --cluster-ssl-keyfile, for both ends of a connection; it must "
        "name the address that others reach this process at",
    )
    cluster_ssl_ca_certs: Path | None = Field(
        None, description="PEM file with the authorities that must have signed the certificates of the others"
    )

    silence_timeout: float = Field(
        2.5,
        ge=1.0,
        le=60.0,
        description="seconds without a message, 1 to 60, after which another process is given up: those that are well "
        "send one every half second. A lost node's requests go on elsewhere; a node that loses a rank, a host or "
        "another data parallel node ends",
    )

    @model_validator(mode="after")
    def _check_cluster(self) -> ClusterSettings:
        self.trust()
        return self

    def trust(self) -> Trust:
        """Read the files. Raises ValueError that names the flag."""
        return Trust(self._secret(), self._tls())

    def warnings(self, listen: HostPort | None) -> list[str]:
        """Warnings about these settings for the operator. listen: the address for other roles, if there is one."""
        warnings, path = [], self.cluster_secret_file
        if path is not None and _others_may_read(path):
            warnings.append(f"--cluster-secret-file: others than its owner may read {path}")
        if listen is not None and not _is_loopback(listen.host) and path is None and self.cluster_ssl_keyfile is None:
            warnings.append(
                f"--cluster-secret-file: without one whoever reaches {listen} is believed: that network must be trusted"
            )
        return warnings

    def _secret(self) -> ClusterSecret | None:
        if self.cluster_secret_file is None:
            return None
        try:
            return read_secret(self.cluster_secret_file)
        except ValueError as error:
            raise ValueError(f"--cluster-secret-file: {error}") from None

    def _tls(self) -> Renewed[Tls] | None:
        key, certificate, authorities = self.cluster_ssl_keyfile, self.cluster_ssl_certfile, self.cluster_ssl_ca_certs
        if key is None and certificate is None and authorities is None:
            return None
        if key is None or certificate is None or authorities is None:
            raise ValueError("--cluster-ssl-keyfile, --cluster-ssl-certfile, --cluster-ssl-ca-certs: all three or none")
        paths = key, certificate, authorities
        return Renewed(paths, lambda: _read_tls(*paths))


def _read_tls(key: Path, certificate: Path, authorities: Path) -> Tls:
    """Raises ValueError that names the flag."""
    files = _read("--cluster-ssl-keyfile", key), _read("--cluster-ssl-certfile", certificate)
    tls = Tls(*files, _read("--cluster-ssl-ca-certs", authorities))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--cluster-ssl-keyfile, --cluster-ssl-certfile: no key with its certificate: {error}"
        ) from None
    try:
        context.load_verify_locations(authorities)
    except OSError as error:
        raise ValueError(f"--cluster-ssl-ca-certs: no certificate in {authorities}: {error}") from None
    return tls


def _read(flag: str, path: Path) -> bytes:
    try:
        return read_regular(path)
    except OSError as error:
        raise ValueError(f"{flag}: cannot read {path}: {error.strerror}") from None


def _others_may_read(path: Path) -> bool:
    """Whether more may read it than must. A file of another user, as Kubernetes gives it, is
    read by its group."""
    about = path.stat()
    more = stat.S_IROTH if about.st_uid != os.geteuid() else stat.S_IRGRP | stat.S_IROTH
    return bool(about.st_mode & more)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a host name
        return host == "localhost"
