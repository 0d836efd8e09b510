"""What a constrained answer must match: a JSON schema, a regular expression, choices, a grammar, or a structural
tag."""

from __future__ import annotations

import enum
import hashlib
import json
import re
from dataclasses import dataclass

from baton.errors import InvalidRequest

MAX_STRUCTURED_CHARS = 256 * 1024

CHECK_STACK_BYTES = 8 * 2**20
COMPILE_STACK_BYTES = 4 * CHECK_STACK_BYTES
"""Of the threads on which a router tries what nodes then compile. Compilers recurse, and where the stack ends, their
process does: 925 definitions that each refer to the next one take 8 MiB of llguidance 1.9."""

_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)


MAX_JSON_WHITESPACE = 64
"""Characters between two tokens of JSON. A weak model may otherwise write blanks and line ends until its last token."""


class StructuredKind(enum.Enum):
    """The values are vLLM's names."""

    JSON = "json"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"


class StructuredBackend(enum.Enum):
    """What compiles it. The values are vLLM's names."""

    GUIDANCE = "guidance"
    XGRAMMAR = "xgrammar"


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """One constraint. `text`, by kind: a JSON schema; nothing; a regular expression; a JSON list of strings; a grammar
    in the form of the backend; a structural tag in JSON. Raises InvalidRequest for a text that is too long, or that has
    half of a surrogate pair."""

    kind: StructuredKind
    text: str = ""

    def __post_init__(self) -> None:
        if len(self.text) > MAX_STRUCTURED_CHARS:
            raise InvalidRequest(
                f"structured_outputs: {self.kind.value} has {len(self.text)} characters, of at most "
                f"{MAX_STRUCTURED_CHARS}",
                "structured_outputs",
            )
        try:
            self.text.encode()
        except UnicodeEncodeError:
            text = f"structured_outputs: {self.kind.value} has half of a surrogate pair"
            raise InvalidRequest(text, "structured_outputs") from None

    @property
    def digest(self) -> bytes:
        """Stands for it where many are remembered: a text may be long."""
        return hashlib.blake2b(f"{self.kind.value}:{self.text}".encode(), digest_size=16).digest()

    def choices(self) -> list[str]:
        """Of kind CHOICE. Raises InvalidRequest."""
        try:
            choices = json.loads(self.text)
        except ValueError:
            choices = None
        if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
            raise InvalidRequest("structured_outputs: choice must be a list of non-empty strings", "structured_outputs")
        return choices


def is_gbnf(grammar: str) -> bool:
    """Whether it has a rule in GBNF, `name ::= ...`, which no grammar in Lark's form has."""
    return _GBNF_RULE.search(grammar) is not None
