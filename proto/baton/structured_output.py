"""What a constrained answer must match: a JSON schema, a regular expression, choices, a grammar, or a structural
tag."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass

from baton.errors import InvalidRequest

MAX_STRUCTURED_CHARS = 256 * 1024


class StructuredKind(enum.Enum):
    """The values are vLLM's names."""

    JSON = "json"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """One constraint. `text`, by kind: a JSON schema; nothing; a regular expression; a JSON list of strings; a grammar
    in Lark's form; a structural tag in JSON. Raises InvalidRequest for a text that is too long."""

    kind: StructuredKind
    text: str = ""

    def __post_init__(self) -> None:
        if len(self.text) > MAX_STRUCTURED_CHARS:
            raise InvalidRequest(
                f"structured_outputs: {self.kind.value} has {len(self.text)} characters, of at most "
                f"{MAX_STRUCTURED_CHARS}",
                "structured_outputs",
            )

    def choices(self) -> list[str]:
        """Of kind CHOICE. Raises InvalidRequest."""
        try:
            choices = json.loads(self.text)
        except ValueError:
            choices = None
        if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
            raise InvalidRequest("structured_outputs: choice must be a list of non-empty strings", "structured_outputs")
        return choices
