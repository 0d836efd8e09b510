"""Lists in pages, as OpenAI's API has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.errors import InvalidRequest

_MAX_ITEMS = 100
_ITEMS = 20


def page_of(items: list[dict[str, Any]], params: Mapping[str, str]) -> dict[str, Any]:
    """The items after the one with the id `after`, at most `limit`, the last ones first unless `order` is asc. Raises
    InvalidRequest."""
    order = params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"`order` must be 'asc' or 'desc', not {order[:64]!r}.", "order")
    limit = _limit(params.get("limit", str(_ITEMS)))
    ordered = items if order == "asc" else items[::-1]
    first = _index_after(ordered, params.get("after"))
    page = ordered[first : first + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": first + limit < len(ordered),
    }


def _limit(given: str) -> int:
    if not (
        given.isascii() and given.isdecimal() and len(given) <= len(str(_MAX_ITEMS)) and 1 <= int(given) <= _MAX_ITEMS
    ):
        raise InvalidRequest(f"`limit` must be in [1, {_MAX_ITEMS}], not {given[:64]!r}.", "limit")
    return int(given)


def _index_after(items: list[dict[str, Any]], after: str | None) -> int:
    if after is None:
        return 0
    found = next((i for i, item in enumerate(items) if item["id"] == after), None)
    if found is None:
        raise InvalidRequest(f"`after` names no item: {after[:64]!r}.", "after")
    return found + 1
