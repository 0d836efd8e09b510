"""An OpenTelemetry collector of the tests' own: it takes OTLP over HTTP, as the SDK sends it."""

from __future__ import annotations

import gzip
import http.server
import threading
from types import TracebackType

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

_JOIN_S = 5.0


class Collector:
    """Serves on a thread of its own while it is entered. Use with `with`."""

    def __init__(self) -> None:
        self._bodies: list[bytes] = []
        taken = self._bodies

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                taken.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_JOIN_S)

    def spans(self) -> dict[str, list[Span]]:
        """All that have arrived, by the name of their service."""
        found: dict[str, list[Span]] = {}
        for body in self._bodies:
            request = ExportTraceServiceRequest.FromString(gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body)
            for resource in request.resource_spans:
                names = {a.key: a.value.string_value for a in resource.resource.attributes}
                for scope in resource.scope_spans:
                    found.setdefault(names["service.name"], []).extend(scope.spans)
        return found


def first_token_of(root: Span) -> tuple[float, dict[str, float]]:
    """The seconds to the first token that a request's span states, and those of its stages."""
    stated = {attribute.key: attribute.value.double_value for attribute in root.attributes}
    prefix = "baton.time_to_first_token."
    stages = {key.removeprefix(prefix)[:-2]: value for key, value in stated.items() if key.startswith(prefix)}
    return stated["gen_ai.latency.time_to_first_token"], stages
