"""Where the pages come from: files, or processes that are watched for a while."""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.address import HostPort
from deploy.tune.pages import Page, Window, windows
from deploy.tune.settings import TuneSettings

TIMEOUT_S = 10.0
MAX_PAGE_BYTES = 64 << 20
NUM_LOOKS = 30
"""Pages of each process: gauges are averaged over them."""


class Unreadable(Exception):
    """Metrics cannot be read. The text names the source."""


@dataclass(frozen=True, slots=True)
class Watched:
    """missing: nodes whose pages cannot be read, and why."""

    windows: Sequence[Window]
    missing: Mapping[str, str] = field(default_factory=dict)


def from_files(paths: Sequence[Path]) -> list[Window]:
    """Raises Unreadable."""
    pages = []
    for path in paths:
        try:
            pages.append(Page.parse(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise Unreadable(f"--metrics: {path}: {error}") from None
    return windows(pages)


def watch(settings: TuneSettings, progress: Callable[[float], object], wait: Callable[[float], object]) -> Watched:
    """Look at all processes several times in --duration. progress: called with the seconds that have passed. wait:
    sleeps. Raises Unreadable."""
    headers = {"Authorization": f"Bearer {settings.api_key.get_secret_value()}"} if settings.api_key else {}
    router, missing = f"{settings.url}/metrics", dict[str, str]()
    nodes = [f"http://{address}/metrics" for address in settings.node_metrics or named_nodes(settings.url, headers)]
    pages: dict[str, list[Page]] = {source: [] for source in (router, *nodes)}
    began, times = time.monotonic(), dict[str, list[float]]()
    for look in range(NUM_LOOKS + 1):
        wait(max(0.0, began + settings.duration * look / NUM_LOOKS - time.monotonic()))
        for source in [source for source in pages if source not in missing]:
            try:
                page = Page.parse(fetch(source, headers if source == router else {}))
                if pages[source] and page.process != pages[source][0].process:
                    raise ValueError("another process answers than before: it began again, or several have the address")
                pages[source].append(page)
                times.setdefault(source, []).append(time.monotonic())
            except (Unreadable, ValueError) as error:
                if source == router:
                    raise Unreadable(f"--url: {error}") from None
                missing[source] = str(error)
        progress(time.monotonic() - began)
    return Watched(
        [
            Window(found, times[source][-1] - times[source][0])
            for source, found in pages.items()
            if source not in missing
        ],
        missing,
    )


def sleep(seconds: float) -> None:
    threading.Event().wait(seconds)


def named_nodes(url: str, headers: Mapping[str, str]) -> list[HostPort]:
    """Where the metrics of the router's nodes are. Raises Unreadable."""
    try:
        stated: dict[str, Any] = json.loads(fetch(f"{url}/debug/nodes", headers))
        addresses = [node.get("metrics_address") for node in stated["nodes"] if node["state"] == "up"]
        return [HostPort.parse(str(address)) for address in addresses if address]
    except (ValueError, LookupError, TypeError) as error:
        raise Unreadable(f"--url: {url}/debug/nodes does not list nodes: {error}") from None


def fetch(url: str, headers: Mapping[str, str]) -> str:
    """Raises Unreadable."""
    try:
        request = urllib.request.Request(url, headers=dict(headers))
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return bytes(answer.read(MAX_PAGE_BYTES)).decode()
    except urllib.error.HTTPError as error:
        with error:
            raise Unreadable(f"{url} answers {error.code}") from None
    except (OSError, http.client.HTTPException, UnicodeDecodeError) as error:
        raise Unreadable(f"{url} cannot be read: {getattr(error, 'reason', error)}") from None
