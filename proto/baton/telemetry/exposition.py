"""The metrics page in the format that a scraper asks for: Prometheus' plain text, or OpenMetrics.

Both use the same names. prometheus_client (0.26) replaces colons with underscores in OpenMetrics samples, but not in
the lines that declare them, unless UTF-8 is allowed in names. So it is always allowed here.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics import exposition as openmetrics

_OPENMETRICS = "application/openmetrics-text"
_PLAIN = ("text/plain", "text/*", "*/*")


def metrics_page(registry: CollectorRegistry, accept: str | None) -> tuple[bytes, str]:
    """The page and its Content-Type, for the value of an Accept header. The plain format wins if both are equally
    acceptable, or if neither is."""
    wanted = _qualities(accept or "")
    plain = next((wanted[kind] for kind in _PLAIN if kind in wanted), 0.0)
    if wanted.get(_OPENMETRICS, 0.0) > plain:
        page: bytes = openmetrics.generate_latest(registry, openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
        return page, openmetrics.CONTENT_TYPE_LATEST
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4


def _qualities(accept: str) -> dict[str, float]:
    """Each media type's largest `q`, regardless of version: the versions do not differ in what is written here."""
    qualities: dict[str, float] = {}
    for entry in accept.split(","):
        kind, *parameters = (part.strip().lower() for part in entry.split(";"))
        q = next((text.partition("=")[2] for text in parameters if text.startswith("q=")), "1")
        try:
            qualities[kind] = max(qualities.get(kind, 0.0), float(q))
        except ValueError:
            continue
    return qualities
