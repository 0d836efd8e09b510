"""API keys: which requests are allowed, and which tenants share cached prompts."""

from __future__ import annotations

import dataclasses
import hmac
import logging
import re
import time
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path
from typing import ClassVar

from baton.errors import InvalidRequest
from baton.regular_files import read_regular, stamp_of
from router.text.generation_request import GenerationRequest

log = logging.getLogger(__name__)

_USABLE = re.compile(r"[!-~]+")
_POLL_S = 1.0


class InvalidApiKey(InvalidRequest):
    """The request carries no API key, or an unknown one. The error does not say which keys exist."""

    http_status: ClassVar[int] = 401
    grpc_status: ClassVar[str] = "UNAUTHENTICATED"


class UnusableKeys(Exception):
    """A key file cannot be read; the text says why, without any key."""


def check_key(key: str) -> str:
    """Return the key. Raises ValueError, without repeating the key, if it cannot stand in an HTTP header."""
    if not _USABLE.fullmatch(key):
        raise ValueError("an API key has one or more printable ASCII characters, and no space")
    return key


class ApiKeys:
    """The given keys, and those in `file`, which is read again when it changes, at most once a second.

    Only digests are kept. Raises UnusableKeys at construction; if the file cannot be read later, the keys stay as they
    were. With `per_key`, requests of different keys share no cached prompts.
    """

    def __init__(
        self,
        keys: Iterable[str] = (),
        file: Path | None = None,
        per_key: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._given = [_digest(key) for key in keys]
        self._file = file
        self._per_key = per_key
        self._clock = clock
        self._in_file: list[bytes] = []
        self._stamp: tuple[int, ...] = ()
        self._next_look = 0.0
        if file is not None:
            self._read(file)
            self._next_look = clock() + _POLL_S

    def owner(self, authorization: str) -> bytes:
        """Check a header `Bearer KEY`; returns what stands for the key, which cannot be derived without it. Raises
        InvalidApiKey.

        Takes equally long for every key, known or not.
        """
        self._reload_if_due()
        scheme, _, key = authorization.partition(" ")
        digest = _digest(key.strip())
        known = False
        for other in (*self._given, *self._in_file):
            known |= hmac.compare_digest(digest, other)
        if not known or scheme.lower() != "bearer":
            raise InvalidApiKey(
                "Incorrect API key provided."
                if authorization
                else "No API key provided: send Authorization: Bearer KEY."
            )
        return digest

    def tenant(self, owner: bytes) -> bytes | None:
        """The salt of the caches of this owner's requests, or None."""
        return owner if self._per_key else None

    def _reload_if_due(self) -> None:
        if self._file is None or self._clock() < self._next_look:
            return
        self._next_look = self._clock() + _POLL_S
        try:
            if stamp_of(self._file) != self._stamp:
                self._read(self._file)
                log.info("read api_key_file=%s keys=%d", self._file, len(self._in_file))
        except (OSError, UnusableKeys) as error:
            log.error("--api-key-file: %s; the keys stay as they were", error)

    def _read(self, path: Path) -> None:
        try:
            self._stamp = stamp_of(path)
            lines = [line.strip() for line in read_regular(path).decode().splitlines()]
            self._in_file = [_digest(check_key(line)) for line in lines if line and not line.startswith("#")]
        except (OSError, UnicodeDecodeError) as error:
            raise UnusableKeys(f"cannot read {path}: {getattr(error, 'strerror', None) or 'it is not text'}") from None
        except ValueError as error:
            raise UnusableKeys(f"{path}: {error}") from None


def salted(wanted: GenerationRequest, tenant: bytes) -> GenerationRequest:
    """Give `wanted` a cache salt that nobody can derive without the key; the client's own salt goes into it."""
    return dataclasses.replace(wanted, cache_salt=hmac.new(tenant, wanted.cache_salt.encode(), sha256).hexdigest())


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()
