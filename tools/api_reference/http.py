"""The HTTP API: endpoints, the fields of their bodies, and what is refused."""

from __future__ import annotations

import importlib
import importlib.util
import json
import pkgutil
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

import router.http
from router.http.descriptions import operations
from router.http.docs_page import body_models
from router.http.field_table import FieldRow, rows_of
from router.http.unsupported import HARMLESS, NO_EFFECT, Harmless, OneOf, is_empty, never
from tools.api_reference.covered import Covered
from tools.api_reference.tables import code, table, test_name

ENDPOINTS = "endpoints"
"""The section of tests/docs/covered.toml for endpoints."""
_RULES = "IN_"
"""How the names of rules begin that belong to one API, in its module `unsupported`."""
_TITLES = ("field", "type", "values", "unset", "meaning", "test")


def endpoints(document: Mapping[str, Any], covered: Covered) -> str:
    rows = []
    for (method, path), content in operations(document).items():
        test = covered.test_of(ENDPOINTS, f"{method} {path}", shared=False)
        rows.append((f"`{method} {path}`", content.get("summary", ""), test_name(test)))
    return table(("endpoint", "answers with", "test"), rows)


def bodies(document: Mapping[str, Any], covered: Covered) -> Iterator[str]:
    """A section for each endpoint with a body, then one for each schema within the bodies."""
    inner: dict[str, None] = {}
    for (method, path), content in operations(document).items():
        names = body_models(content, document)
        if names:
            yield f"### {method} {path}\n\n{_fields(names[0], document, covered)}"
            inner |= dict.fromkeys(names[1:])
    for name in inner:
        yield f"### {name}\n\n{_fields(name, document, covered)}"


def refused() -> Iterator[str]:
    """The rules for all, then those of each API's own."""
    yield _rules(HARMLESS)
    for package in pkgutil.iter_modules(router.http.__path__, "router.http."):
        own = dict(_own_rules(package.name)) if package.ispkg else {}
        if own:
            title = (importlib.import_module(package.name).__doc__ or package.name).partition(":")[0]
            yield f"### {title}\n\n{_rules(own)}"


def without_effect() -> str:
    return table(("field", "why"), [(code(name), why) for name, why in sorted(NO_EFFECT.items())])


def rule_text(rule: Harmless) -> str:
    """Which values are taken although the field is not supported."""
    if isinstance(rule, OneOf):
        return "unless " + ", ".join(code(_plain(value)) for value in rule.harmless)
    if rule is is_empty:
        return "unless empty, `false` or `0`"
    return "always" if rule is never else "unless it changes nothing"


def _fields(name: str, document: Mapping[str, Any], covered: Covered) -> str:
    rows = rows_of(document["components"]["schemas"][name])
    return table(_TITLES, [_row(row, covered.test_of(name, row.name)) for row in rows])


def _row(row: FieldRow, test: str) -> tuple[str, ...]:
    return (code(row.name), row.kind, row.values, row.default, row.description, test_name(test))


def _rules(rules: Mapping[str, Harmless]) -> str:
    by_text: dict[str, list[str]] = {}
    for name, rule in rules.items():
        by_text.setdefault(rule_text(rule), []).append(code(name))
    return table(("refused", "fields"), [(text, ", ".join(names)) for text, names in by_text.items()])


def _own_rules(package: str) -> Iterator[tuple[str, Harmless]]:
    if importlib.util.find_spec(f"{package}.unsupported") is None:
        return
    module = importlib.import_module(f"{package}.unsupported")
    supported = _fields_in(f"{package}.schemas")
    for name, rules in vars(module).items():
        if name.startswith(_RULES):
            yield from ((field, rule) for field, rule in rules.items() if field not in supported)


def _fields_in(module: str) -> set[str]:
    """The fields of all schemas that the module defines."""
    found = vars(importlib.import_module(module)).values()
    kinds = [kind for kind in found if isinstance(kind, type) and kind.__module__ == module]
    return {name for kind in kinds if issubclass(kind, BaseModel) for name in kind.model_fields}


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
