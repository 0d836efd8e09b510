"""Keeps responses in memory for a while, for the clients that made them."""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pydantic_core

from baton.errors import InvalidRequest
from router.http.errors.responses_api import PreviousResponseNotFound, ResponseNotFound
from router.http.responses_api.conversation import AnyItem
from router.http.responses_api.items import ITEMS

log = logging.getLogger(__name__)

_OVERHEAD_BYTES = 1024
"""Of each response, beside its texts."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """As JSON, which takes the least memory: `body` is the response, `input` the items of the whole conversation before
    its output."""

    body: bytes
    input: bytes

    @property
    def size(self) -> int:
        return len(self.body) + len(self.input) + _OVERHEAD_BYTES

    def response(self) -> dict[str, Any]:
        return dict(_read(self.body))

    def input_items(self) -> list[dict[str, Any]]:
        return list(_read(self.input))

    def output(self) -> list[AnyItem]:
        return list(ITEMS.validate_python(self.response()["output"]))

    def conversation(self) -> list[AnyItem]:
        """All items, the output included. Raises InvalidRequest for a response without an end to go on from."""
        response = self.response()
        if response["status"] not in ("completed", "incomplete"):
            text = f"Previous response with id '{response['id']}' has the status {response['status']}."
            raise InvalidRequest(text, "previous_response_id")
        return list(ITEMS.validate_python([*_read(self.input), *response["output"]]))


class ResponseStore:
    """The responses used last: at most `max_responses`, and `max_bytes` together. `owner`: the client's API key, as a
    digest; clients without one share what they store."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[bytes, str], StoredResponse] = OrderedDict()
        self.num_bytes = 0

    @property
    def is_on(self) -> bool:
        return self._max_responses > 0

    def put(self, owner: bytes, response_id: str, response: StoredResponse) -> None:
        """In place of what there was of it before."""
        if (earlier := self._kept.pop((owner, response_id), None)) is not None:
            self.num_bytes -= earlier.size
        if response.size > self._max_bytes or not self.is_on:
            log.warning("not stored response=%s bytes=%d", response_id, response.size)
            return
        self._kept[owner, response_id] = response
        self.num_bytes += response.size
        while len(self._kept) > self._max_responses or self.num_bytes > self._max_bytes:
            _, dropped = self._kept.popitem(last=False)
            self.num_bytes -= dropped.size

    def get(self, owner: bytes, response_id: str) -> StoredResponse:
        """Raises ResponseNotFound."""
        response = self._kept.get((owner, response_id))
        if response is None:
            raise ResponseNotFound(response_id)
        self._kept.move_to_end((owner, response_id))
        return response

    def has(self, owner: bytes, response_id: str) -> bool:
        return (owner, response_id) in self._kept

    def previous(self, owner: bytes, response_id: str) -> StoredResponse:
        """Raises PreviousResponseNotFound."""
        try:
            return self.get(owner, response_id)
        except ResponseNotFound:
            raise PreviousResponseNotFound(response_id) from None

    def delete(self, owner: bytes, response_id: str) -> None:
        """Raises ResponseNotFound."""
        self.get(owner, response_id)
        self.num_bytes -= self._kept.pop((owner, response_id)).size


@dataclass(frozen=True, slots=True)
class ResponseSaver:
    """Stores one response, once it has ended. `input`: see StoredResponse."""

    store: ResponseStore
    owner: bytes
    response_id: str
    input: bytes

    def keep(self, body: bytes) -> None:
        self.store.put(self.owner, self.response_id, StoredResponse(body, self.input))


def dump_items(items: Sequence[AnyItem]) -> bytes:
    """Items as the store keeps them."""
    kept: list[dict[str, Any]] = [{"id": item.id or f"item_{i}", **item.kept()} for i, item in enumerate(items)]
    return json.dumps(kept, ensure_ascii=False, separators=(",", ":")).encode()


def _read(content: bytes) -> Any:
    return pydantic_core.from_json(content)
