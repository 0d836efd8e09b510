"""The API reference: a hook of mkdocs (`mkdocs.yml`) that adds a page for each of our modules.

A page holds nothing but the name of its module; mkdocstrings fills in the docstrings, which it reads from the sources
without importing them. The packages are those that the import contracts in `pyproject.toml` name.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parent.parent
SOURCE_ROOTS = (ROOT, ROOT / "proto", ROOT / "kernels")
FOLDER = "api"
GENERATED = "_pb2"
"""In the names of stubs that protoc wrote: the `.proto` files document them."""


def packages() -> list[str]:
    """The top-level packages, in the order of `root_packages`."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    names: list[str] = settings["tool"]["importlinter"]["root_packages"]
    return names


def modules(package: str) -> Iterator[str]:
    """The dotted names of a package's modules, itself first, each package before what is in it."""
    (root,) = (root for root in SOURCE_ROOTS if (root / package / "__init__.py").exists())
    for path in sorted((root / package).rglob("*.py"), key=lambda path: path.relative_to(root).with_suffix("").parts):
        parts = path.relative_to(root).with_suffix("").parts
        if GENERATED not in path.stem and path.stem not in ("__init__", "__main__"):
            yield ".".join(parts)
        elif path.stem == "__init__" and path.stat().st_size:
            yield ".".join(parts[:-1])


def page_of(module: str) -> str:
    """Where a module's page lies within the docs."""
    return f"{FOLDER}/{module}.md"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages behind those of `mkdocs.yml`, one section for each package."""
    sections: list[dict[str, Any]] = [
        {package: [{module: page_of(module)} for module in modules(package)]} for package in packages()
    ]
    assert config.nav is not None
    config.nav.append({"API reference": sections})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Make the pages."""
    from mkdocs.structure.files import File

    for package in packages():
        for module in modules(package):
            text = f"# `{module}`\n\n::: {module}\n"
            files.append(File.generated(config, page_of(module), content=text))
    return files
