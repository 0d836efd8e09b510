"""Sends spans to an OpenTelemetry collector, over OTLP and HTTP. Needs the packages of the extra `otlp`.

The SDK's processor keeps a bounded queue and sends from a thread of its own: a collector that is slow or gone costs
spans and nothing else.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import TYPE_CHECKING

import baton
from baton.telemetry.spans import Span, spans_of
from baton.telemetry.timeline import Timeline

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

_MAX_SERVICES = 4096
_CLOSE_S = 2.0


class NoOpenTelemetry(Exception):
    """The packages are not installed."""


class SpanSender:
    """`router`: the name of this one. Raises NoOpenTelemetry."""

    def __init__(self, endpoint: str, router: str, exporter: SpanExporter | None = None) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise NoOpenTelemetry(f"{error}: pip install 'baton-serve[otlp]'") from None
        self._router = router
        self._processor = BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=endpoint))

    def send(self, timeline: Timeline) -> None:
        """Queue its spans, if it has a trace that is recorded."""
        for span in spans_of(timeline, self._router):
            assert timeline.trace is not None
            self._processor.on_end(_readable(span, timeline.trace.trace_id))

    def close(self) -> None:
        """Send what is queued, as far as the collector takes it within two seconds."""
        closing = threading.Thread(target=self._close, name="otlp-close", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)

    def _close(self) -> None:
        """The SDK's time limits do not bound an export that has begun: one takes up to ten seconds."""
        self._processor.force_flush()
        self._processor.shutdown()  # type: ignore[no-untyped-call, unused-ignore]  # where the SDK is installed


def _readable(span: Span, trace_id: int) -> ReadableSpan:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    sampled = TraceFlags(TraceFlags.SAMPLED)
    parent = SpanContext(trace_id, span.parent_id, True, sampled) if span.parent_id else None
    return ReadableSpan(
        name=span.name,
        context=SpanContext(trace_id, span.span_id, False, sampled),
        parent=parent,
        resource=_resource(span.service, span.instance),
        attributes=span.attributes,
        kind=SpanKind.SERVER if span.name == "llm_request" else SpanKind.INTERNAL,
        status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.OK),
        start_time=int(span.start_s * 1e9),
        end_time=int(span.end_s * 1e9),
    )


@lru_cache(_MAX_SERVICES)
def _resource(service: str, instance: str) -> Resource:
    from opentelemetry.sdk.resources import Resource

    names = {"service.name": service, "service.instance.id": instance, "service.version": baton.__version__}
    return Resource.create(names)
