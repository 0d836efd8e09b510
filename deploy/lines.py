"""Lines of several processes on one stream, each prefixed with its process's name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TextIO

from baton.process.patient_writer import PatientWriter

COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)  # ANSI codes, without red
RESET = "\x1b[0m"


class NamedLines:
    """Writes `NAME | LINE`. Names are coloured if `stream` is a terminal and NO_COLOR is not set."""

    def __init__(self, stream: TextIO, names: Sequence[str]) -> None:
        self._out = PatientWriter(stream)
        width = max(len(name) for name in names)
        coloured = stream.isatty() and not os.environ.get("NO_COLOR")
        self._heads = {}
        for i, name in enumerate(names):
            head = f"{name:{width}} |"
            self._heads[name] = f"\x1b[{COLOURS[i % len(COLOURS)]}m{head}{RESET}" if coloured else head

    def __call__(self, name: str, line: str) -> None:
        head = self._heads[name]
        lost = "which nobody read, or for which the disk was full"
        self._out.write_or_count(f"{head} {line}\n", lambda count: f"{head} lines lost: {count}, {lost}\n")
