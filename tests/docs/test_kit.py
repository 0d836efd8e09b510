"""What the project shows to the public agrees with the code: workflow, templates, hooks, changelog, site."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import baton
from tools import api_pages

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOW: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())
FORMS = sorted(path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")


def name_of(requirement: str) -> str:
    """As constraints.txt writes it: without extras and versions."""
    found = re.match(r"[\w.-]+", requirement)
    assert found
    return found[0].lower()


def test_every_python_that_is_named_is_tested() -> None:
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert WORKFLOW["jobs"]["test"]["strategy"]["matrix"]["python"] == named
    assert PROJECT["requires-python"] == f">={named[0]}"


def test_the_workflow_calls_make() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    steps = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]
    called = [step["run"].split()[1] for step in steps if "run" in step]
    assert called == ["test", "docs"]
    assert set(called) <= targets
    uses = [step["uses"] for step in steps if "uses" in step]
    assert all(re.fullmatch(r"actions/[a-z-]+@v\d+", action) for action in uses)


def test_hooks_run_what_setup_installs() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    programs = {Path(hook["entry"].split()[0]).name for repo in config["repos"] for hook in repo["hooks"]}
    installed = {name_of(requirement) for requirement in PROJECT["optional-dependencies"]["dev"]}
    assert programs - {"python"} <= installed | {"lint-imports"}
    assert "import-linter" in installed


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_is_one(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert form["name"]
    assert form["description"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields) > 0
    assert all(field["attributes"]["label"] for field in fields)


def test_the_changelog_ends_with_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    entries = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", text, re.M)
    assert entries[0] == ("Unreleased", "")
    assert entries[1][0] == baton.__version__
    dates = [date for _, date in entries[1:]]
    assert dates == sorted(dates, reverse=True)
    assert all(dates)
    kinds = set(re.findall(r"^### (.*)$", text, re.M))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_every_requirement_is_pinned() -> None:
    pinned = set(re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.M))
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    assert {name_of(requirement) for group in groups for requirement in group} - pinned == set()


def test_the_site_has_every_page() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    pages = [page for entry in config["nav"] for page in ([entry] if isinstance(entry, str) else entry.values())]
    assert sorted(pages) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))
    assert config["hooks"] == [str(Path(api_pages.__file__).relative_to(ROOT))]


def test_the_reference_has_every_module() -> None:
    packages = api_pages.packages()
    found = {package: list(api_pages.modules(package)) for package in packages}
    assert all(names[0] == package for package, names in found.items())
    names = [name for group in found.values() for name in group]
    assert {"baton.wire.values", "baton_kernels.linear.kernel", "router.http.app"} <= set(names)
    assert not [name for name in names if "_pb2" in name]
    assert len(set(names)) == len(names)
