"""Failures that only this API has."""

from __future__ import annotations

from typing import ClassVar

from baton.errors import InvalidRequest


class PreviousResponseNotFound(InvalidRequest):
    """`previous_response_id` names a response that is not kept here, or that is another client's."""

    def __init__(self, response_id: str) -> None:
        super().__init__(f"Previous response with id '{response_id[:64]}' not found.", "previous_response_id")


class ResponseNotFound(InvalidRequest):
    """The path names a response that is not kept here, or that is another client's."""

    http_status: ClassVar[int] = 404
    grpc_status: ClassVar[str] = "NOT_FOUND"

    def __init__(self, response_id: str) -> None:
        super().__init__(f"Response with id '{response_id[:64]}' not found.", "response_id")


class ItemNotFound(InvalidRequest):
    """A reference names an item of no response that is kept here, or of another client's."""

    http_status: ClassVar[int] = 404
    grpc_status: ClassVar[str] = "NOT_FOUND"

    def __init__(self, item_id: str) -> None:
        super().__init__(f"Item with id '{item_id[:64]}' not found.", "input")
