"""A Prometheus that scrapes a cluster: dashboard and alerts have data, and what is counted is what happened."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from baton.address import HostPort
from deploy.ports import HeldPort
from tests.e2e.client import Client
from tests.e2e.cluster import Cluster, Member, wait_until

PROMETHEUS = shutil.which("prometheus")
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed"),
]

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ("--engine=simulated", "--profile=h200-8b", "--num-gpu-blocks-override=9000")
PROMPT = [5 + i % 4000 for i in range(700)]
VARIABLES = {"$model": ".*", "$__rate_interval": "30s"}
NEEDS_FAILURES = "baton:failovers_total"
"""Has no samples before the first failure."""


class Prometheus:
    """Scrapes the members four times a second, with the alerts that are shipped."""

    def __init__(self, folder: Path, members: list[Member], port: HostPort) -> None:
        self.url = f"http://{port}"
        targets = [member.url.removeprefix("http://") for member in members]
        config = {
            "global": {"scrape_interval": "250ms", "evaluation_interval": "250ms"},
            "rule_files": [str(ROOT / "deploy" / "prometheus" / "alerts.yml")],
            "scrape_configs": [{"job_name": "baton", "static_configs": [{"targets": targets}]}],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        assert PROMETHEUS is not None
        flags = [
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'tsdb'}",
            f"--web.listen-address={port}",
        ]
        with (folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen([PROMETHEUS, *flags], stdout=log, stderr=log)

    def query(self, query: str) -> list[Any]:
        """The series. Raises httpx.HTTPError if it does not answer."""
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": query})
        assert answer.status_code != httpx.codes.BAD_REQUEST, answer.text
        result: list[Any] = answer.raise_for_status().json()["data"]["result"]
        return result

    def value(self, query: str) -> float:
        """Of the one series, or 0 if there is none."""
        found = self.query(query)
        return float(found[0]["value"][1]) if found else 0.0

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)


@contextlib.contextmanager
def scraping(folder: Path, members: list[Member]) -> Iterator[Prometheus]:
    port = HeldPort(HostPort("127.0.0.1", 0))
    prometheus = Prometheus(folder, members, port.address)
    try:
        yield prometheus
    finally:
        prometheus.close()
        port.close()


def queries() -> Iterator[tuple[str, str]]:
    """Of the dashboard as they are, and of alerts what they compare."""
    for panel in json.loads((ROOT / "deploy" / "grafana" / "baton.json").read_text())["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            for name, value in VARIABLES.items():
                query = query.replace(name, value)
            yield panel["title"], query
    for rule in yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())["groups"][0]["rules"]:
        for selector in re.findall(r"(?:baton:\w+|\bup\b)(?:\{[^}]*\})?", rule["expr"]):
            yield rule["alert"], re.sub(r'(?:state|reason)!?[=~]+"[^"]*",? ?|outcome="failed"|,? ?\{\}', "", selector)


async def test_prometheus_sees_what_happens(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        prefill = cluster.node("prefill", "prefill-0", *FLAGS)
        decode = cluster.node("decode", "decode-0", *FLAGS)
        router = cluster.router([prefill], [decode])
        await asyncio.to_thread(router.wait_ready)
        with scraping(tmp_path, [router, prefill, decode]) as prometheus:
            await asyncio.to_thread(wait_until, lambda: _why_not_up(prometheus))
            async with Client(router) as client:
                for number in range(8):
                    answer = await client.complete([*PROMPT, number], max_tokens=20, ignore_eos=True)
                    assert answer.error is None
            wanted = 'sum(baton:request_ends_total{outcome="finished"}) == 8'
            await asyncio.to_thread(wait_until, lambda: None if prometheus.query(wanted) else "8 ends are not there")
            assert prometheus.value("sum(baton:generation_tokens_total)") == 160
            assert prometheus.value("sum(baton:prompt_tokens_total)") == 8 * 701
            assert prometheus.value('sum(baton:kv_transfer_bytes_total{role="decode"})') > 0
            staged = prometheus.value("sum(baton:time_to_first_token_stage_seconds_sum)")
            assert staged == pytest.approx(prometheus.value("sum(baton:time_to_first_token_seconds_sum)"), rel=0.02)
            await asyncio.to_thread(wait_until, lambda: _why_empty(prometheus), 60.0)
            firing = prometheus.query('ALERTS{alertstate="firing"}')
            assert not firing, f"nothing is wrong, and there are alerts: {firing}"


def _why_not_up(prometheus: Prometheus) -> str | None:
    try:
        up = prometheus.value('count(up{job="baton"} == 1)')
    except httpx.HTTPError as error:
        return f"prometheus does not answer yet: {error}"
    return None if up == 3 else f"{up} of 3 processes are up"


def _why_empty(prometheus: Prometheus) -> str | None:
    """Rates need two scrapes."""
    empty = [
        f"{where}: {query}" for where, query in queries() if NEEDS_FAILURES not in query and not prometheus.query(query)
    ]
    return f"queries without data: {empty}" if empty else None
