"""Settings of `baton top`."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, SecretStr, field_validator

from baton.settings import Settings
from deploy.server_url import check_server_url


class TopSettings(Settings):
    """Show a router's nodes, requests and latencies in a terminal, until Ctrl-C.

    Exits with 0, with 1 if the router refuses or, with --once, does not answer, and with 2 for bad settings.
    """

    prog: ClassVar[str] = "baton top"

    url: str = Field("http://127.0.0.1:8000", description="the router's HTTP API, with or without /v1 at the end")
    api_key: SecretStr | None = Field(None, description="sent as a bearer token; better in the environment than here")
    interval: float = Field(1.0, ge=0.1, le=3600, description="seconds from one look to the next")
    once: bool = Field(
        False, description="look twice, print one table and exit; as always where the output is no terminal"
    )

    @field_validator("url")
    @classmethod
    def _is_url(cls, url: str) -> str:
        return check_server_url(url).removesuffix("/v1")
