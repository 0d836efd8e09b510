"""Settings of `baton doctor`. Those that nodes and routers have too mean the same here."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from baton.settings import ConnectAddress, ConnectAddresses, ListenAddress, Settings

SECRETS = ("cluster_secret_file", "api_key_file", "admin_api_key_file", "admin_key_file")
CERTIFICATES = ("ssl_certfile", "ssl_ca_certs", "cluster_ssl_certfile", "cluster_ssl_ca_certs")


class DoctorSettings(Settings):
    """Check this machine, and the transfer path: within it, or with another machine, where the command runs with
    --listen while it runs here with --peer.

    Exits with 0, with 1 if a check failed, and with 2 for bad settings.
    """

    prog: ClassVar[str] = "baton doctor"

    listen: ListenAddress | None = Field(
        None,
        description="as a flag: wait there for baton doctor --peer, and answer it; from the environment or the file, "
        "where it is a node's: must be free",
    )
    peer: ConnectAddress | None = Field(
        None,
        description="where baton doctor --listen waits, to test the way there; unset: the test is within this machine",
    )
    peer_timeout: float = Field(
        300.0, gt=0, description="seconds to wait for the other machine, and for a test with it to end"
    )
    self_test: bool = Field(True, description="move KV blocks over the transport; --peer and --listen need it")
    self_test_mib: int | None = Field(
        None, ge=1, le=4096, description="MiB to move each time; unset: 512 between GPUs, else 64"
    )
    transport: Literal["ucx", "ipc", "nixl", "nccl"] = Field(
        "ucx", description="as for a node: what carries KV blocks; the one that must work, and that the test uses"
    )
    transfer_interface: str | None = Field(None, description="as for a node: network interface for KV blocks")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="as for a node: where the KV blocks are")
    cpu_threads: int | None = Field(None, ge=1, le=1024, description="as for a node: enough CPUs for them")
    tensor_parallel_size: int = Field(1, ge=1, le=64, description="as for a node: enough CPUs for its ranks")
    pipeline_parallel_size: int = Field(1, ge=1, le=64, description="as for a node: likewise")
    nnodes: int = Field(1, ge=1, le=64, description="as for a node: hosts of its ranks")
    workers: int = Field(1, ge=1, le=64, description="as for a router: enough CPUs for its processes")
    model: str | None = Field(None, description="as for a node: a checkpoint to look at")
    ports: ConnectAddresses = Field((), description="addresses that a node or router is to listen on: must be free")
    cluster_secret_file: Path | None = Field(
        None, description="as for a node: its permissions, and a secret that the other machine must know too"
    )
    api_key_file: Path | None = Field(None, description="as for a router: its permissions")
    admin_api_key_file: Path | None = Field(None, description="as for a router: its permissions")
    admin_key_file: Path | None = Field(None, description="as for a node: its permissions")
    ssl_certfile: Path | None = Field(None, description="as for a router: its dates")
    ssl_ca_certs: Path | None = Field(None, description="as for a router: their dates")
    cluster_ssl_certfile: Path | None = Field(None, description="as for a node: its dates")
    cluster_ssl_ca_certs: Path | None = Field(None, description="as for a node: their dates")
    json_output: bool = Field(
        False, description="write the findings as JSON; also --json", json_schema_extra={"flag": "--json"}
    )

    def problem(self) -> str | None:
        """Why these settings do not go together, once it is clear whether --listen is meant."""
        if self.peer is not None and self.listen is not None:
            return "--peer, --listen: one on each of the two machines"
        if not self.self_test and (self.peer or self.listen):
            return "--no-self-test: --peer and --listen are for that test"
        return None
