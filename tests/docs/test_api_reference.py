"""docs/api.md is what the code says, and every endpoint and parameter in it has a test."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from router.http.unsupported import HARMLESS, OneOf
from tools.api_reference.covered import ROOT, TABLE, Covered, load
from tools.api_reference.http import rule_text
from tools.api_reference.page import PATH, render


@pytest.fixture(scope="module")
def covered() -> Covered:
    """After the page was written."""
    covered = load()
    render(covered)
    return covered


@cache
def functions_in(path: Path) -> frozenset[str]:
    return frozenset(
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def test_the_page_is_what_the_code_says() -> None:
    assert PATH.read_text() == render(load()), "run: python -m tools.api_reference"


def test_every_endpoint_and_parameter_has_a_test(covered: Covered) -> None:
    lines = [f'[{section}] {name} = "tests/FILE.py::test_NAME"' for section, name in covered.missing]
    assert not lines, f"add to {TABLE.relative_to(ROOT)}, in the section or in [fields]: {lines}"


def test_the_table_names_only_what_there_is(covered: Covered) -> None:
    assert covered.unused == set()
    nodes = {node for names in covered.sections.values() for node in names.values()}
    missing = []
    for node in sorted(nodes):
        path, _, name = node.partition("::")
        if not (ROOT / path).is_file() or not name.startswith("test_") or name not in functions_in(ROOT / path):
            missing.append(node)
    assert missing == []


def test_what_is_looked_up_comes_from_the_nearest_section() -> None:
    covered = Covered({"A": {"x": "a", "*": "all"}, "fields": {"x": "shared", "y": "shared"}})
    assert [covered.test_of("A", name) for name in ("x", "y", "z")] == ["a", "shared", "all"]
    assert [covered.test_of("A", name, shared=False) for name in ("y", "z")] == ["all", "all"]
    assert (covered.test_of("B", "x"), covered.test_of("B", "z")) == ("shared", "")
    assert covered.missing == [("B", "z")]
    assert covered.unused == set()


def test_rules_are_said_in_words() -> None:
    assert rule_text(HARMLESS["suffix"]) == "unless empty, `false` or `0`"
    assert rule_text(HARMLESS["input"]) == "always"
    assert rule_text(OneOf("none", 1, ["text"])) == 'unless `none`, `1`, `["text"]`'
    assert rule_text(lambda value: value is True) == "unless it changes nothing"
