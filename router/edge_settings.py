"""Settings of the router's outer edge: who has access, and how much one client may use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, model_validator

from baton.settings import Names, Settings
from router.api_keys import check_key
from router.http.limits import ConnectionLimits

_CONNECTIONS = ConnectionLimits()


def _secrets(value: object) -> object:
    """Parse a text with keys between spaces, or a list of such. Errors do not repeat the key."""
    texts = [value] if isinstance(value, str | SecretStr) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str | SecretStr) for text in texts):
        raise ValueError("an API key must be a text")
    plain = [text.get_secret_value() if isinstance(text, SecretStr) else text for text in texts]
    keys = [key for text in plain for key in (text.split(" ") if text else [text])]
    return tuple(SecretStr(check_key(key)) for key in keys)


def _root_path(value: str) -> str:
    if value and not value.startswith("/"):
        raise ValueError("must begin with /")
    return value.rstrip("/")


Secrets = Annotated[tuple[SecretStr, ...], BeforeValidator(_secrets)]
RootPath = Annotated[str, AfterValidator(_root_path)]


class EdgeSettings(Settings):
    """What `baton-router` lets in."""

    api_key: Secrets = Field(
        (), description="key that requests must carry, as Authorization: Bearer KEY; may be given several times"
    )
    api_key_file: Path | None = Field(
        None, description="file with keys that requests must carry, one a line, read again when it changes"
    )
    protect_metrics: bool = Field(False, description="ask for a key at /metrics too")
    cache_salt_per_key: bool = Field(
        False,
        description="requests of different API keys share no cached prompts, so none can time the others' prompts",
    )
    timings: bool = Field(True, description="tell clients where the time went, and how many prompt tokens were cached")

    ssl_keyfile: Path | None = Field(None, description="private key for TLS on both ports; unset: in --ssl-certfile")
    ssl_certfile: Path | None = Field(
        None, description="certificate for TLS on both ports, with its chain; unset: no TLS"
    )
    ssl_ca_certs: Path | None = Field(
        None, description="PEM file with the authorities that must have signed the certificates of clients"
    )
    ssl_cert_reqs: int = Field(
        0, ge=0, le=2, description="certificates of clients: 0 not asked for, 1 checked if there is one, 2 required"
    )

    root_path: RootPath = Field(
        "", description="prefix at which a proxy serves the HTTP API, as in /llm; it may strip the prefix or not"
    )
    allowed_origins: Names = Field((), description="origins of web pages that may ask (CORS), * for any; unset: none")
    allowed_methods: Names = Field(("*",), description="methods that web pages of --allowed-origins may use")
    allowed_headers: Names = Field(("*",), description="headers that web pages of --allowed-origins may send")
    allow_credentials: bool = Field(
        False, description="let web pages of --allowed-origins send credentials, as cookies"
    )

    max_body_bytes: int = Field(
        8 * 2**20, ge=1024, description="size of a request's body or message, bytes; larger ones are a 413"
    )
    max_buffered_body_bytes: int = Field(
        256 * 2**20, ge=1024, description="size of all bodies that are being received over HTTP at once, bytes"
    )
    max_header_bytes: int = Field(
        _CONNECTIONS.max_header_bytes,
        ge=4096,
        description="size of a request's headers, or of a call's metadata, bytes",
    )
    max_connections: int | None = Field(
        None, ge=1, description="connections to each port; unset: what open files allow, at most 16384"
    )
    header_timeout: float = Field(
        _CONNECTIONS.header_timeout_s, gt=0, description="seconds that a request's headers may take to come"
    )
    body_timeout: float = Field(
        _CONNECTIONS.body_timeout_s,
        gt=0,
        description="seconds that a request's body, or a call's message, may take to come",
    )
    write_timeout: float = Field(
        _CONNECTIONS.write_timeout_s, gt=0, description="seconds that an answer waits for a client that does not read"
    )
    idle_timeout: float = Field(
        _CONNECTIONS.idle_timeout_s, gt=0, description="seconds that a connection may stay open without a request"
    )
    websocket_idle_timeout: float = Field(
        600.0, gt=0, description="seconds that a WebSocket may stay open without a request"
    )

    @property
    def has_api_keys(self) -> bool:
        return bool(self.api_key) or self.api_key_file is not None

    @model_validator(mode="after")
    def _check_edge(self) -> EdgeSettings:
        if not self.has_api_keys:
            for flag, given in (
                ("cache-salt-per-key", self.cache_salt_per_key),
                ("protect-metrics", self.protect_metrics),
            ):
                if given:
                    raise ValueError(f"--{flag}: needs --api-key or --api-key-file")
        if self.ssl_certfile is None:
            for flag, path in (("ssl-keyfile", self.ssl_keyfile), ("ssl-ca-certs", self.ssl_ca_certs)):
                if path is not None:
                    raise ValueError(f"--{flag}: needs --ssl-certfile")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ValueError("--ssl-cert-reqs: needs --ssl-ca-certs")
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ValueError("--allow-credentials: name the --allowed-origins, * would let any page act for its reader")
        if self.max_buffered_body_bytes < self.max_body_bytes:
            raise ValueError("--max-buffered-body-bytes: must not be below --max-body-bytes")
        return self
