"""Names that fields have in other forms of the same request."""

from __future__ import annotations

from collections.abc import Mapping

from baton.errors import InvalidRequest


def rename_field(error: InvalidRequest, names: Mapping[str, str]) -> None:
    """Name a mistake after what the client sent. names: fields as the error may call them, and what they are there."""
    if (own := names.get(error.param or "")) is None:
        return
    if error.message.startswith((f"{error.param}: ", f"{error.param} ")):
        error.args = (own + error.message.removeprefix(str(error.param)), *error.args[1:])
    error.param = own
