"""`output_config`: how hard the model is to think, and what its answer must match."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from baton.errors import InvalidRequest
from baton.structured_output.constraint import StructuredOutput
from router.http.fields import CONFIG
from router.text.structured_output import structured_output_of


class OutputFormat(BaseModel):
    model_config = CONFIG
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    model_config = CONFIG
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None

    def check(self) -> None:
        """Raises InvalidRequest."""
        unknown = next((name for name, value in (self.model_extra or {}).items() if value), None)
        if unknown is not None:
            raise InvalidRequest(f"`{unknown[:64]}` in `output_config` is not supported here.", "output_config")

    def constraint(self) -> StructuredOutput | None:
        """What the text of the answer must match."""
        if self.format is None:
            return None
        return structured_output_of({"type": "json_schema", "json_schema": {"schema": self.format.schema_}}, None, {})
