"""constraints.txt has a version for everything, and only versions."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LINES = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
PINS = dict(line.split("==") for line in LINES)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_every_requirement_is_pinned_to_a_version_that_it_allows() -> None:
    extras = PROJECT["optional-dependencies"]
    for text in (*PROJECT["dependencies"], *extras["node"], *extras["dev"]):
        requirement = Requirement(text)
        pin = PINS[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pin, prereleases=True), f"{text}: {pin}"


def test_one_plain_version_a_line_in_order() -> None:
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line) for line in LINES)
    assert sorted(PINS) == list(PINS)


def test_torch_and_the_triton_that_its_cuda_build_demands() -> None:
    assert (PINS["torch"], PINS["triton"]) == ("2.13.0", "3.7.1")
