"""`/` and `/console/`: the console's files. They hold no data, and so need no key: the page asks for one."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib import resources

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

INDEX = "index.html"
FOLDER = "/console/"
_KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
SECURITY = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}
"""Scripts and styles come from the router alone, nothing is written into the page's text, and no other page may put it
into a frame to have its buttons pressed."""


@dataclass(frozen=True, slots=True)
class File:
    body: bytes
    headers: Mapping[str, str]


@functools.cache
def files() -> dict[str, File]:
    """By name; read once in a process."""
    found: dict[str, File] = {}
    for entry in resources.files("router.http.console").joinpath("static").iterdir():
        body = entry.read_bytes()
        etag = f'"{sha256(body).hexdigest()[:32]}"'
        headers = {"etag": etag, "cache-control": "no-cache", "content-type": _KINDS[entry.name.rpartition(".")[2]]}
        found[entry.name] = File(body, {**headers, **SECURITY})
    return found


def paths() -> frozenset[str]:
    """All that the page consists of."""
    return frozenset({"/", *(FOLDER + name for name in files())})


def routes() -> APIRouter:
    router = APIRouter()

    async def index(request: Request) -> Response:
        return _answer(request, files()[INDEX])

    async def one(request: Request, file: str) -> Response:
        found = files().get(file)
        if found is None:
            raise HTTPException(404)
        return _answer(request, found)

    router.add_api_route("/", index, methods=["GET", "HEAD"])
    router.add_api_route(FOLDER + "{file}", one, methods=["GET", "HEAD"])
    return router


def _answer(request: Request, file: File) -> Response:
    """Browsers ask whether their copy is still the newest: so a new version of baton has a new page at once."""
    if request.headers.get("if-none-match") == file.headers["etag"]:
        return Response(status_code=304, headers=dict(file.headers))
    return Response(file.body, headers=dict(file.headers))
