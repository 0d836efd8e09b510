"""The pages name only what exists: files, links, make targets, flags."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deploy.settings import UpSettings
from router.settings import RouterSettings

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
)
# Paths below the import roots are written as imports see them, without the root.
PLACES = (ROOT, ROOT / "proto")
OWN_FOLDERS = (
    "baton_llm",
    "proto",
    "kernels",
    "engine",
    "kv_transfer",
    "node",
    "prefill_node",
    "decode_node",
    "router",
    "deploy",
    "tools",
)
BENCHMARK = re.compile(r"\bbenchmarks((?:\.[a-z_]+)+)")
PATH = re.compile(rf"`((?:baton|tests|docs|benchmarks|{'|'.join(OWN_FOLDERS)})/[\w./*-]*)`")


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    named = [path for path in PATH.findall(text) if "NAME" not in path]
    missing = [path for path in named if not any(next(place.glob(path), None) for place in PLACES)]
    assert missing == []


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", (ROOT / page).read_text()):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        there = (ROOT / page).parent / path if path else ROOT / page
        assert there.exists(), target
        assert not anchor or anchor in headings_of(there), target


def headings_of(page: Path) -> set[str]:
    """As links name them."""
    return {
        re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    }


@pytest.mark.parametrize("page", ["Makefile", *(page for page in PAGES if page != "CHANGELOG.md")])
def test_named_benchmarks_exist(page: str) -> None:
    named = {name[1:].replace(".", "/") for name in BENCHMARK.findall((ROOT / page).read_text())}
    folder = ROOT / "benchmarks"
    assert [name for name in named if not (folder / f"{name}.py").exists() and not (folder / name).is_dir()] == []


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_exist(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"(?:^|`)make ([a-z][a-z-]*)", (ROOT / page).read_text(), re.M))
    assert named
    assert named <= targets


def test_named_flags_exist() -> None:
    text = (ROOT / "README.md").read_text()
    known = {f"--{name.replace('_', '-')}" for name in UpSettings.model_fields | RouterSettings.model_fields} | {
        "--listen",
        "--advertise",
        "--pipeline-parallel-size",
    }
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) <= known | {"--help"}
