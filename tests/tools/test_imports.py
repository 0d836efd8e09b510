"""What the import contracts of pyproject.toml do not see: circles of files inside a package."""

from __future__ import annotations

import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[2]


def test_no_files_import_one_another_in_a_circle() -> None:
    """Imports inside functions count. Those of types do not, nor that a module gets something from a package that it is
    part of: a kernel does, whose package has the signature."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    graph = grimp.build_graph(*settings["root_packages"], exclude_type_checking_imports=True, cache_dir=None)
    assert len(graph.modules) > 500
    imported = {
        module: {name for name in graph.find_modules_directly_imported_by(module) if not module.startswith(f"{name}.")}
        for module in graph.modules
    }
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        raise AssertionError(" imports ".join(reversed(error.args[1]))) from None
