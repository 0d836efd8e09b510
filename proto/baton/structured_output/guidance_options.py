"""What llguidance is told beside a JSON schema, in the schema's own `x-guidance`."""

from __future__ import annotations

from typing import Any

from baton.structured_output.constraint import MAX_JSON_WHITESPACE

_OPTIONS = {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MAX_JSON_WHITESPACE}}}"}


def with_limited_whitespace(schema: Any) -> Any:
    """The schema, which must not be changed. One that brings options of its own keeps them alone."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, dict) or "x-guidance" in schema:
        return schema
    return {**schema, "x-guidance": _OPTIONS}
