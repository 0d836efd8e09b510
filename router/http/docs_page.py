"""`/docs`: the API as a page. It is one answer, without scripts: nothing is fetched from elsewhere, and it needs no
files beside the code, as Swagger's page would."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from html import escape
from typing import Any

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from router.http.descriptions import operations
from router.http.field_table import FieldRow, models_of, rows_of
from router.http.openapi import describe

_POLICY = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
details { border: 1px solid #8886; border-radius: 6px; margin: .5rem 0; padding: .5rem .8rem; }
summary { cursor: pointer; }
h3 { margin: 1rem 0 .3rem; font-size: 1rem; }
table { border-collapse: collapse; width: 100%; }
td, th { border-bottom: 1px solid #8884; padding: .25rem .5rem; text-align: left; vertical-align: top; }
code { font: .9em ui-monospace, monospace; overflow-wrap: anywhere; }
.method { display: inline-block; min-width: 3.2rem; font-weight: 600; }
.note { color: #888; }
"""


def routes() -> APIRouter:
    page, router = _page(), APIRouter()

    async def docs() -> HTMLResponse:
        return HTMLResponse(page, headers=_POLICY)

    router.add_api_route("/docs", docs, methods=["GET", "HEAD"])
    return router


@functools.cache
def _page() -> str:
    return render(describe())


def render(document: dict[str, Any]) -> str:
    """The page of an OpenAPI document."""
    info = document["info"]
    title = f"{info['title']} {info['version']}"
    parts = [_operation(method, path, content, document) for (method, path), content in operations(document).items()]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>\n'
        f'<body><h1>{escape(title)}</h1>\n<p>For programs: <a href="openapi.json">openapi.json</a></p>\n'
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _operation(method: str, path: str, content: dict[str, Any], document: dict[str, Any]) -> str:
    head = f'<span class="method">{method}</span> <code>{escape(path)}</code>'
    summary = f'{head} <span class="note">{_text(content.get("summary", ""))}</span>'
    tables = "".join(_model(name, document) for name in body_models(content, document))
    answers = [f"{status} {answer['description']}" for status, answer in content["responses"].items()]
    items = "".join(f"<li>{_text(answer)}</li>" for answer in answers)
    return f"<details><summary>{summary}</summary>{tables}<h3>Answers</h3><ul>{items}</ul></details>"


def _model(name: str, document: dict[str, Any]) -> str:
    rows = "".join(map(_field, rows_of(document["components"]["schemas"][name])))
    head = "".join(f"<th>{title}</th>" for title in ("field", "type", "values", "unset", ""))
    return f"<h3>{escape(name)}</h3><table><tr>{head}</tr>{rows}</table>"


def _field(row: FieldRow) -> str:
    texts = (row.kind, row.values, row.default, row.description)
    cells = "".join(f"<td>{_text(text)}</td>" for text in texts)
    return f"<tr><td><code>{escape(row.name)}</code></td>{cells}</tr>"


def body_models(content: Mapping[str, Any], document: Mapping[str, Any]) -> list[str]:
    """The names of the schemas of an operation's body: the body, then those that it refers to."""
    names = models_of(content.get("requestBody", {}))
    for name in names:  # grows meanwhile
        names += [inner for inner in models_of(document["components"]["schemas"][name]) if inner not in names]
    return names


def _text(text: str) -> str:
    """Text with `code`."""
    pieces = escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if i % 2 else piece for i, piece in enumerate(pieces))
