"""A node's pages for monitoring: `/metrics`, checks such as `/health` that say why not, and JSON to look into it."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from baton.address import HostPort
from baton.errors import BatonError

Check = Callable[[], str | None]
Page = Callable[[], str]
StartResponse = Callable[[str, list[tuple[str, str]]], object]


class MetricsServer:
    """Serves on its own thread from construction to `close`.

    `checks`: by path, what to ask; an answer of None is a 200, any other a 503 with that text. `pages`: by path, what
    makes its JSON; a BatonError that it raises is the answer. They run on the page's threads. Raises OSError when
    `listen` cannot be had.
    """

    def __init__(
        self, listen: HostPort, registry: CollectorRegistry, checks: Mapping[str, Check], pages: Mapping[str, Page]
    ) -> None:
        self._metrics: Any = make_wsgi_app(registry)
        self._checks = checks
        self._pages = pages
        kind = _Server6 if ":" in listen.host else _Server
        self._server = make_server(listen.host, listen.port, self._answer, server_class=kind, handler_class=_Quiet)
        self.address = HostPort(listen.host, self._server.server_port)
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        self._server.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread; `serve_forever` would look up twice a second
        self._thread.join(timeout=5)
        self._server.server_close()

    def _serve(self) -> None:
        while not self._closing:
            self._server.handle_request()

    def _answer(self, environ: dict[str, Any], start: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            answer: Iterable[bytes] = self._metrics(environ, start)
            return answer
        if check := self._checks.get(path):
            reason = check()
            return _reply(start, HTTPStatus.SERVICE_UNAVAILABLE if reason else HTTPStatus.OK, reason or "ok")
        if page := self._pages.get(path):
            try:
                return _reply(start, HTTPStatus.OK, page(), "application/json")
            except BatonError as error:
                return _reply(start, HTTPStatus(error.http_status), error.message)
        return _reply(start, HTTPStatus.NOT_FOUND, "try " + " ".join(["/metrics", *self._checks, *self._pages]))


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:
        # not HTTPServer's own, which asks the resolver for this machine's name: seconds without a network
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Quiet(WSGIRequestHandler):
    timeout = 10.0  # seconds that a silent client may hold a thread

    def log_message(self, *_: object) -> None:
        """A line for every scrape would drown the log."""


def _reply(start: StartResponse, status: HTTPStatus, text: str, kind: str = "text/plain") -> list[bytes]:
    body = (text + "\n").encode()
    headers = [("Content-Type", f"{kind}; charset=utf-8"), ("Content-Length", str(len(body)))]
    start(f"{status.value} {status.phrase}", headers)
    return [body]
