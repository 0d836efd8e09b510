"""Settings of where the router's nodes are, beside the lists of their addresses."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from baton.settings import ConnectAddresses, Settings
from router.edge_settings import Secrets


class DiscoverySettings(Settings):
    """How `baton-router` learns of nodes while it runs."""

    prefill_dns: ConnectAddresses = Field(
        (), description="NAME:PORT whose every address is a prefill node, looked up again every --dns-interval"
    )
    decode_dns: ConnectAddresses = Field(
        (), description="NAME:PORT whose every address is a decode node, looked up again every --dns-interval"
    )
    dns_interval: float = Field(5.0, gt=0, description="seconds between two lookups of --prefill-dns and --decode-dns")
    nodes_file: Path | None = Field(
        None, description="YAML or JSON file with lists prefill and decode of HOST:PORT, read again when it changes"
    )
    admin_api_key: Secrets = Field(
        (), description="key of /admin/nodes, which adds and removes nodes; unset: there is no such path"
    )
    admin_api_key_file: Path | None = Field(
        None, description="file with keys of /admin/nodes, one a line, read again when it changes"
    )

    @property
    def has_admin_keys(self) -> bool:
        return bool(self.admin_api_key) or self.admin_api_key_file is not None

    @property
    def finds_nodes(self) -> bool:
        """Whether nodes may come that no list of addresses names."""
        return bool(self.decode_dns) or self.nodes_file is not None or self.has_admin_keys

    @model_validator(mode="after")
    def _check_discovery(self) -> DiscoverySettings:
        every = [*self.prefill_dns, *self.decode_dns]
        twice = next((name for name in every if every.count(name) > 1), None)
        if twice:  # two lookups would undo each other, if only one of them fails
            raise ValueError(f"--prefill-dns, --decode-dns: {twice} is given twice")
        return self
