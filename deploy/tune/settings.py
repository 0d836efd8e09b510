"""Settings of `baton tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field, SecretStr, field_validator

from baton.settings import ConnectAddresses, Settings
from deploy.server_url import check_server_url


def _paths(value: object) -> object:
    """Parse `a,b`, or a list of such texts."""
    texts = value if isinstance(value, list | tuple) else [value]
    return tuple(part for text in texts for part in str(text).split(",") if part)


class TuneSettings(Settings):
    """Read the metrics of a cluster under load, and propose what to set: P:D ratio, sizes of steps and pools.

    Exits with 0, with 1 if metrics cannot be read, and with 2 for bad settings.
    """

    prog: ClassVar[str] = "baton tune"

    url: str = Field("http://127.0.0.1:8000", description="the router, whose metrics are read while it is under load")
    api_key: SecretStr | None = Field(None, description="sent as a bearer token; better in the environment than here")
    duration: float = Field(30.0, gt=0, le=86_400, description="seconds to watch")
    node_metrics: ConnectAddresses = Field(
        (), description="addresses of nodes' /metrics; unset: those that the router names"
    )
    metrics: Annotated[tuple[Path, ...], BeforeValidator(_paths)] = Field(
        (),
        description="saved pages of /metrics of router and nodes, to read instead; two of a process: between them",
    )
    goodput_ttft: float | None = Field(None, gt=0, description="goal: TTFT in seconds of 90% of the requests")
    goodput_itl: float | None = Field(None, gt=0, description="goal: ITL in seconds of 99% of the tokens")
    json_output: bool = Field(
        False, description="write figures and proposals as JSON; also --json", json_schema_extra={"flag": "--json"}
    )

    @field_validator("url")
    @classmethod
    def _is_url(cls, url: str) -> str:
        return check_server_url(url).removesuffix("/v1")
