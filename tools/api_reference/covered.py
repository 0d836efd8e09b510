"""Which test covers an endpoint or a parameter: tests/docs/covered.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "tests" / "docs" / "covered.toml"
SHARED = "fields"
"""The section for fields that mean the same in every schema."""
ALL = "*"
"""In a section: all of its fields that it does not name."""

Key = tuple[str, str]


@dataclass(slots=True)
class Covered:
    """`sections[section][name]` is pytest's id of a test. Remembers what was looked up and what was missing."""

    sections: Mapping[str, Mapping[str, str]]
    used: set[Key] = field(default_factory=set)
    missing: list[Key] = field(default_factory=list)

    def test_of(self, section: str, name: str, shared: bool = True) -> str:
        """The id of its test; empty if there is none. `shared`: the section `fields` may have it too."""
        places = [(section, name), (SHARED, name), (section, ALL)] if shared else [(section, name), (section, ALL)]
        for place, key in places:
            if key in self.sections.get(place, {}):
                self.used.add((place, key))
                return self.sections[place][key]
        self.missing.append((section, name))
        return ""

    @property
    def unused(self) -> set[Key]:
        return {(section, name) for section, names in self.sections.items() for name in names} - self.used


def load() -> Covered:
    return Covered(tomllib.loads(TABLE.read_text()))
