"""Which logits processors a request asks for: by the name of an installed entry point, with arguments."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from baton.errors import InvalidRequest

PARAM = "logits_processors"
THINKING_BUDGET = "thinking_token_budget"
"""Of the processor that all nodes have: see `node.thinking_budget`."""
MAX_LOGITS_PROCESSORS = 16
MAX_NAME_CHARS = 256
MAX_ARGUMENTS_CHARS = 64 * 1024
"""Of one processor, as JSON."""


@dataclass(frozen=True, slots=True)
class LogitsProcessor:
    """One that a request asks for. `arguments`: JSON, an object that may have `args`, a list, and `kwargs`, an object;
    empty: none. Raises InvalidRequest for what is too long."""

    name: str
    arguments: str = ""

    def __post_init__(self) -> None:
        _check(0 < len(self.name) <= MAX_NAME_CHARS, f"a name must have 1 to {MAX_NAME_CHARS} characters")
        _check(self.name.isprintable(), "a name must be printable")
        most = MAX_ARGUMENTS_CHARS
        _check(len(self.arguments) <= most, f"{self.name}: arguments must be at most {most} characters of JSON")

    @classmethod
    def of(cls, name: str, args: list[Any] | None, kwargs: dict[str, Any] | None) -> LogitsProcessor:
        """Raises InvalidRequest."""
        given = {key: value for key, value in (("args", args), ("kwargs", kwargs)) if value}
        try:
            arguments = json.dumps(given, separators=(",", ":")) if given else ""
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"{PARAM}: {name}: arguments are no JSON: {type(error).__name__}", PARAM) from None
        return cls(name, arguments)

    def parsed(self) -> tuple[list[Any], dict[str, Any]]:
        """`args` and `kwargs`. Raises InvalidRequest."""
        try:
            given = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            given = None
        _check(isinstance(given, dict), f"{self.name}: arguments must be a JSON object")
        others = sorted(set(given) - {"args", "kwargs"})
        _check(not others, f"{self.name}: arguments have `args` and `kwargs`, not {', '.join(others)[:64]!r}")
        args, kwargs = given.get("args", []), given.get("kwargs", {})
        _check(isinstance(args, list), f"{self.name}: args must be a list")
        _check(isinstance(kwargs, dict), f"{self.name}: kwargs must be an object")
        return args, kwargs


def _check(holds: bool, rule: str) -> None:
    if not holds:
        raise InvalidRequest(f"{PARAM}: {rule}", PARAM)
