"""Checks that what is installed is what baton's metadata declares."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Iterable, Iterator

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import baton
from deploy.doctor.finding import Finding, failure, ok, skipped

DISTRIBUTION = "baton-serve"
NODE = "node"
_INSTALL = f"pip install '{DISTRIBUTION}[{NODE}]'"
"""The extra that a node needs."""


def findings() -> Iterator[Finding]:
    try:
        stated = importlib.metadata.metadata(DISTRIBUTION)
        declared = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        yield skipped("versions", "baton runs from a folder that was not installed, so no versions are declared.")
        return
    yield python(platform.python_version(), str(stated["Requires-Python"] or ""))
    yield baton_version(baton.__version__, str(stated["Version"]))
    yield router_packages(_wanted(declared, ""), installed_version)
    yield from node_packages(_wanted(declared, NODE), installed_version)


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def python(version: str, declared: str) -> Finding:
    if SpecifierSet(declared).contains(version, prereleases=True):
        return ok("python", f"Python {version}, within {declared or 'any'}.")
    return failure("python", f"Python {version} is not within {declared}.", f"Install a Python {declared}.")


def baton_version(running: str, installed: str) -> Finding:
    if Version(running) == Version(installed):
        return ok("baton", f"baton {running}.")
    return failure(
        "baton",
        f"baton {running} runs, and {installed} is installed: another copy comes first on the import path.",
        "Start it from elsewhere, or unset PYTHONPATH.",
    )


def router_packages(wanted: Iterable[Requirement], version_of: Callable[[str], str | None]) -> Finding:
    """All packages of the base install, as one finding."""
    wanted = [*wanted]
    if wrong := [text for requirement in wanted if (text := _problem(requirement, version_of(requirement.name)))]:
        return failure("packages", f"{'; '.join(wrong)}.", f"pip install --upgrade {DISTRIBUTION}")
    return ok("packages", f"{len(wanted)} packages that a router needs are as declared.")


def node_packages(wanted: Iterable[Requirement], version_of: Callable[[str], str | None]) -> Iterator[Finding]:
    """A finding for each package of a node; one for all if there is no torch."""
    if version_of("torch") is None:
        yield skipped("torch", "torch is not installed: this machine can only run a router.", _INSTALL)
        return
    for requirement in wanted:
        installed = version_of(requirement.name)
        if problem := _problem(requirement, installed):
            yield failure(requirement.name, f"{problem}.", _INSTALL)
        else:
            yield ok(requirement.name, f"{requirement.name} {installed}, within {requirement.specifier}.")


def _problem(requirement: Requirement, installed: str | None) -> str:
    """Empty if there is none."""
    if installed is None:
        return f"{requirement.name} is not installed"
    if not requirement.specifier.contains(Version(installed), prereleases=True):
        return f"{requirement.name} {installed} is not within {requirement.specifier}"
    return ""


def _wanted(declared: Iterable[str], extra: str) -> list[Requirement]:
    """The requirements of an extra; empty: of the base install."""
    found = []
    for requirement in map(Requirement, declared):
        marker = requirement.marker
        in_base = marker is None or marker.evaluate({"extra": ""})
        if in_base is (not extra) and (not extra or (marker is not None and marker.evaluate({"extra": extra}))):
            found.append(requirement)
    return found
