"""Asks a router for the snapshot of its console."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, build_opener

from deploy.top.settings import TopSettings

PATH = "/debug/console"
TIMEOUT_S = 5.0
_MAX_BYTES = 64 * 2**20

Snapshot = dict[str, Any]


class NoAnswer(Exception):
    """The router gave no snapshot. `final`: it would give none another time either."""

    def __init__(self, text: str, final: bool = False) -> None:
        super().__init__(text)
        self.final = final


class Source:
    """One router."""

    def __init__(self, settings: TopSettings) -> None:
        self.url = settings.url
        key = settings.api_key
        self._headers = {"authorization": f"Bearer {key.get_secret_value()}"} if key else {}
        self._opener = build_opener()

    def snapshot(self) -> Snapshot:
        """Of this moment. Raises NoAnswer."""
        request = Request(self.url + PATH, headers=self._headers)
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as answer:
                snapshot = json.loads(answer.read(_MAX_BYTES))
        except HTTPError as error:
            with error:
                raise _refused(error, self.url) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise NoAnswer(f"no answer from {self.url}: {error}") from None
        if not isinstance(snapshot, dict) or "work" not in snapshot:
            raise NoAnswer(f"{self.url}{PATH} is not a baton router's", final=True)
        return snapshot


def _refused(error: HTTPError, url: str) -> NoAnswer:
    if error.code == 401:
        return NoAnswer(f"{url} wants a key: --api-key, or BATON_API_KEY in the environment", final=True)
    if error.code == 404:
        return NoAnswer(f"{url} has no {PATH}: it is no baton router, or an older one", final=True)
    return NoAnswer(f"{url} answers with {error.code}")
