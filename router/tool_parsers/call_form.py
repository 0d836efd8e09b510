"""The form in which an answer must write its calls, for requests that constrain it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton.structured_output.structural_tag import Format


@dataclass(frozen=True, slots=True)
class CallForm:
    """A call is `before`, the name, `between`, the arguments in JSON, `after`. `separator` is between calls; `opening`
    and `closing` are around them all. `trigger`: what only calls begin with; None: nothing is certain to be a call."""

    before: str
    between: str
    after: str
    separator: str
    opening: str = ""
    closing: str = ""
    trigger: str | None = None

    def some(self, schemas: Sequence[tuple[str, Any]], only_one: bool) -> Format:
        """The format of one or more calls and nothing else, of tools with these names and schemas of arguments."""
        calls = {
            "type": "tags_with_separator",
            "tags": self._tags(schemas),
            "separator": self.separator,
            "at_least_one": True,
            "stop_after_first": only_one,
        }
        if not self.opening:
            return calls
        return {"type": "tag", "begin": self.opening, "content": calls, "end": self.closing}

    def within_text(self, schemas: Sequence[tuple[str, Any]]) -> Format | None:
        """The format of free text that may have calls; None: they cannot be told from other text."""
        if self.trigger is None:
            return None
        return {"type": "triggered_tags", "triggers": [self.trigger], "tags": self._tags(schemas)}

    def _tags(self, schemas: Sequence[tuple[str, Any]]) -> list[Format]:
        return [
            {
                "type": "tag",
                "begin": f"{self.before}{json.dumps(name)[1:-1]}{self.between}",
                "content": {"type": "json_schema", "json_schema": schema},
                "end": self.after,
            }
            for name, schema in schemas
        ]
