"""The benchmark of schemas counts what compiles, what is accepted, and what has to be killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.settings import load
from baton.structured_output import xgrammar_compiler
from benchmarks.accuracy.structured_schemas import SchemaBenchSettings, run

GOOD = {
    "schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    "tests": [{"valid": True, "data": {"a": 1}}, {"valid": False, "data": {"a": "x"}}],
}
REFUSED = {"schema": {"type": "frob"}, "tests": [{"valid": True, "data": 1}]}
HANGS = {"schema": {"allOf": [{"type": "string", "pattern": f".*{i}.*"} for i in range(20)]}, "tests": []}
WRONG = {"schema": {"type": "integer"}, "tests": [{"valid": True, "data": "what the schema forbids"}]}


def test_each_line_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xgrammar_compiler, "is_installed", lambda: False)  # one backend is enough here
    path = tmp_path / "schemas.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (GOOD, HANGS, REFUSED, WRONG)))
    line = run(load(SchemaBenchSettings, {"schemas": path, "vocab_size": 1000, "time_limit": 0.3}))
    counted = line["backends"]["guidance"]
    names = ("schemas", "compiled", "refused", "late", "lost", "valid", "valid_walked", "invalid", "invalid_walked")
    assert [counted[name] for name in names] == [4, 2, 1, 1, 0, 3, 2, 1, 1]
    assert counted["valid_accepted_compact"] == counted["valid_accepted_spaced"] == 1
    assert counted["invalid_accepted"] == 0
    assert counted["masks"] > 4
