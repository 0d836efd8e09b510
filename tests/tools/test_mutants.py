"""The table of mutations fits, and has each rule of the protocol; whether tests see them says `make mutants`."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from tools import mutants
from tools.mutants import Mutation

FOLDERS = {
    "router",
    "node",
    "prefill_node",
    "decode_node",
    "engine",
    "kv_transfer",
    "baton_kernels",
    "baton",
    "baton_llm",
    "deploy",
}


@pytest.fixture(scope="module")
def table() -> list[Mutation]:
    return mutants.load()


def test_every_entry_has_its_place_and_its_tests(table: list[Mutation]) -> None:
    assert list(mutants.stale(table)) == []


def test_all_folders_have_their_share(table: list[Mutation]) -> None:
    assert len(table) >= 150
    shares = Counter(mutation.folder for mutation in table)
    assert set(shares) == FOLDERS
    assert min(shares.values()) >= 10
    assert not [m for m, count in Counter((m.file, m.old, m.new) for m in table).items() if count > 1]


def test_every_rule_of_the_protocol_is_broken_by_one(table: list[Mutation]) -> None:
    rules = mutants.rules()
    assert {"identity 1", "handoff 4", "blocks 2", "the client leaves"} <= set(rules)
    named = {mutation.rule for mutation in table if mutation.rule}
    assert named == set(rules)


# ---- the runner, on a tree of its own ----


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "adding.py").write_text("def add(a, b):\n    return a + b\n")
    (tmp_path / "test_adding.py").write_text(
        "from adding import add\n\n\ndef test_sum():\n    assert add(2, 2) == 4\n\n\ndef test_nothing():\n    pass\n"
    )
    return tmp_path


def subtraction(**fields: object) -> Mutation:
    why, tests = "a sum is a difference", ["test_adding.py"]
    plain = {"file": "adding.py", "old": "a + b", "new": "a - b", "why": why, "tests": tests}
    return Mutation(**{**plain, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, None),
        ({"old": "a * b"}, "is there 0 times"),
        ({"old": "a"}, "is there 3 times"),
        ({"new": "a + b"}, "changes nothing"),
        ({"file": "gone.py"}, "is there 0 times"),
        ({"tests": ["test_adding.py::test_sums"]}, "there is no test_adding.py::test_sums"),
        ({"tests": ["test_gone.py"]}, "there is no test_gone.py"),
    ],
)
def test_an_entry_that_does_not_fit_is_named(tree: Path, fields: dict[str, object], says: str | None) -> None:
    found = list(mutants.stale([subtraction(**fields)], tree))
    assert len(found) == (says is not None)
    assert says is None or says in found[0]


def test_a_copy_has_one_mutation_at_a_time(tree: Path) -> None:
    path = tree / "adding.py"
    before, time_ns = path.read_text(), path.stat().st_mtime_ns
    copy = mutants.Tree(tree)
    copy.mutate(subtraction(), 1)
    assert "return a - b" in path.read_text()
    assert path.stat().st_mtime_ns != time_ns, "python would take what it compiled before"
    copy.restore()
    assert (path.read_text(), path.stat().st_mtime_ns) == (before, time_ns)


def test_who_survives_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    dead, alive = subtraction(), subtraction(file="deploy/adding.py", survives="nobody adds")
    assert mutants.report([dead, alive], [alive]) == 0.5
    out = capsys.readouterr().out
    assert "nobody adds" in out
    assert out.splitlines()[-1] == "1 of 2 killed (50%)"


def test_a_run_tells_what_its_tests_say_and_leaves_nobody_behind(tmp_path: Path) -> None:
    """Instead of pytest: one that fails, one that hangs."""
    failing = mutants.Run(tmp_path, [], lambda: os._exit(1))
    mutants.wait([failing])
    assert failing.is_over
    assert failing.finish() == 1
    ours, theirs = os.pipe()
    hanging = mutants.Run(tmp_path, [], lambda: os.close(ours) or os.read(os.pipe()[0], 1))
    os.close(theirs)
    assert not hanging.is_over
    hanging.deadline = 0.0
    assert hanging.finish() is None
    assert os.read(ours, 1) == b"", "it lives"
    os.close(ours)
