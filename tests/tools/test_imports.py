"""What the import contracts of pyproject.toml do not see: circles inside a package.

Imports inside functions count. Those of types do not, nor that a module gets something from a package that it is part
of: a kernel does, whose package has the signature.
"""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def imported() -> dict[str, set[str]]:
    """For each module, those that it imports."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    graph = grimp.build_graph(*settings["root_packages"], exclude_type_checking_imports=True, cache_dir=None)
    assert len(graph.modules) > 500
    return {
        module: {name for name in graph.find_modules_directly_imported_by(module) if not module.startswith(f"{name}.")}
        for module in graph.modules
    }


def test_no_files_import_one_another_in_a_circle(imported: dict[str, set[str]]) -> None:
    require_no_circle(imported)


def test_no_folders_import_one_another_in_a_circle(imported: dict[str, set[str]]) -> None:
    """Nor a folder and a file beside it."""
    beside = defaultdict[str, set[str]](set)
    for module, names in imported.items():
        for name in names:
            common = len(common_part(module, name))
            if 0 < common < len(name.split(".")):
                beside[first(module, common + 1)].add(first(name, common + 1))
    require_no_circle(beside)


def common_part(one: str, other: str) -> list[str]:
    pairs = zip(one.split("."), other.split("."), strict=False)
    parts = list[str]()
    for a, b in pairs:
        if a != b:
            break
        parts.append(a)
    return parts


def first(module: str, num_parts: int) -> str:
    return ".".join(module.split(".")[:num_parts])


def require_no_circle(imported: Mapping[str, set[str]]) -> None:
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        raise AssertionError(" imports ".join(reversed(error.args[1]))) from None
