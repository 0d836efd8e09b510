"""The value of --log-level: how severe a log line must be to be written, for all modules and for some.

info                                 everything from info on
warning,router.http=debug,node=info  warnings, of router.http and what is below it everything, of node from info on
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

LEVELS = ("debug", "info", "warning", "error")
_MODULE = re.compile(r"\w+(\.\w+)*", re.ASCII)


@dataclass(frozen=True, slots=True)
class LogLevels:
    """As numbers of `logging`. `of_modules`: of loggers that differ from `root`, and of those below them."""

    root: int = logging.INFO
    of_modules: Mapping[str, int] = field(default_factory=dict)

    def apply(self) -> None:
        """Set them in this process."""
        logging.getLogger().setLevel(self.root)
        for module, level in self.of_modules.items():
            logging.getLogger(module).setLevel(level)


def parse_log_levels(text: str) -> LogLevels:
    """Raises ValueError that says what is wrong with the text."""
    levels: dict[str, int] = {}
    for part in text.split(","):
        module, equals, level = part.strip().rpartition("=")
        if equals and not _MODULE.fullmatch(module):
            raise ValueError(f"must have a module before each '=', as in router.http=debug, not {part.strip()!r}")
        if level.lower() not in LEVELS:
            raise ValueError(f"must be of {', '.join(LEVELS)}, or MODULE=LEVEL, not {part.strip()!r}")
        if module in levels:
            raise ValueError(f"must name {module or 'the level of all modules'} once, not twice")
        levels[module] = logging.getLevelNamesMapping()[level.upper()]
    return LogLevels(levels.pop("", logging.INFO), levels)
