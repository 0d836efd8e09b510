"""Metrics as a scraper sees them: the same names in both formats, who tells, and nothing counted twice."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_plain

from baton.address import HostPort
from baton.messages import AttemptId, End, Prefill, Sample, Started, Tokens, Update
from baton.node_info import NodeRole
from baton.sampling import SamplingParams
from baton.telemetry import ROUTER, AdminGate, MetricsServer, NodeMetrics, RouterMetrics, metrics_page, new_registry
from deploy.ports import HeldPort
from tests.router.conftest import Router

OPENMETRICS = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75"
WAIT_S = 30.0
LOCAL = HostPort("127.0.0.1", 0)

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def node_registry(role: str) -> CollectorRegistry:
    """A node's, that has had one request with a prompt of 5 tokens."""
    registry = new_registry(role)
    metrics, attempt_id = NodeMetrics(registry, "tiny"), AttemptId(1, "r", 0)
    metrics.received(Prefill(attempt_id, "i", (1, 2, 3, 4, 5), (Sample(0),), SamplingParams(), 1.0))
    for kind in (Started(2, 0.01), Tokens(0, 0, (5, 6)), End()):
        metrics.sent(Update(attempt_id, kind))
    return registry


def samples(registry: CollectorRegistry, accept: str, parse=parse_plain) -> Samples:
    page, _ = metrics_page(registry, accept)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parse(page.decode())
        for sample in family.samples
        if not sample.name.startswith("process_")  # they change from page to page
    }


def test_both_formats_say_the_same_under_the_same_names() -> None:
    registry = node_registry("decode")
    plain, openmetrics = samples(registry, "text/plain"), samples(registry, OPENMETRICS, parse_openmetrics)
    assert plain == openmetrics
    names = {name for name, _ in plain}
    assert "baton:node_prompt_tokens_total" in names
    assert "vllm:prompt_tokens_total" in names
    assert all(name.startswith(("baton:", "vllm:")) for name in names)


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        (None, "text/plain"),
        ("*/*", "text/plain"),
        (OPENMETRICS + ",text/plain;version=0.0.4;q=0.5,*/*;q=0.1", "application/openmetrics-text"),
        ("text/plain;version=0.0.4;q=0.6,application/openmetrics-text;q=0.5", "text/plain"),
        ("application/openmetrics-text;version=1.0.0;escaping=underscores;q=0.9", "application/openmetrics-text"),
        ("application/openmetrics-text;q=0", "text/plain"),
        ("application/openmetrics-text;q=\x00;;=,,", "text/plain"),
    ],
)
def test_the_format_is_the_one_asked_for(accept: str | None, kind: str) -> None:
    page, told = metrics_page(new_registry(ROUTER), accept)
    assert told.startswith(kind)
    assert page.endswith(b"# EOF\n") is (kind != "text/plain")


def test_every_sample_says_who_tells_and_no_name_is_told_by_both_sides() -> None:
    router = new_registry(ROUTER)
    metrics = RouterMetrics(router)
    metrics.ended("tiny", 0.5, None, "stop")
    metrics.prompt_tokens.labels("tiny").inc(5)
    metrics.set_requests({"queued": 1})
    told = {role: samples(registry, "") for role, registry in (("router", router), ("decode", node_registry("decode")))}
    for role, said in told.items():
        assert {dict(labels)["role"] for _, labels in said} == {role}
    families = [{m.name for m in registry.collect()} for registry in (router, node_registry("prefill"))]
    shared = {name for name in families[0] & families[1] if not name.startswith(("process_", "vllm:"))}
    assert shared == {"baton:build_info"}


async def test_a_router_tells_endpoint_pickers_of_the_blocks_of_its_decode_nodes(router: Router, client) -> None:
    infos = [node.info for node in router.nodes.nodes if node.info.role is NodeRole.DECODE]
    total, size = sum(info.num_blocks for info in infos), infos[0].layout.block_size
    (line,) = [line for line in (await client.get("/metrics")).text.splitlines() if "vllm:cache_config_info{" in line]
    assert f'block_size="{size}"' in line
    assert f'num_gpu_blocks="{total}"' in line
    assert line.endswith(" 1.0")


async def test_what_clients_send_names_no_series(client: httpx.AsyncClient) -> None:
    async def names() -> set[str]:
        text = (await client.get("/metrics")).text
        return {line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")}

    async def ask(i: int) -> None:
        wish = {"model": f"model-{i}", "prompt": "hello", "max_tokens": 1, "user": f"user-{i}"}
        await client.post("/v1/completions", json=wish, headers={"X-Request-Id": f"id-{i}"})
        await client.post("/v1/completions", json=wish | {"model": "tiny", "stop": [f"stop-{i}"]})
        await client.get(f"/page-{i}")

    await ask(0)
    before = await names()
    for i in range(1, 6):
        await ask(i)
    assert await names() == before


# ---- with a real Prometheus ----


class Forwarder:
    """A page in front of another, which asks for plain text whatever it is asked for. `kinds` are those that it got."""

    def __init__(self, url: str, accept: str | None) -> None:
        kinds: set[str] = set()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                request = urllib.request.Request(url, headers={"Accept": accept or self.headers["Accept"]})
                with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
                    kind, page = answer.headers["Content-Type"], answer.read()
                kinds.add(kind.partition(";")[0])
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.end_headers()
                with contextlib.suppress(ConnectionError):  # Prometheus has ended meanwhile
                    self.wfile.write(page)

            def log_message(self, *_: object) -> None:
                """Not for a test's output."""

        self.kinds = kinds
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.target = f"127.0.0.1:{self._server.server_port}"
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(WAIT_S)
        self._server.server_close()


class Prometheus:
    """The real one, scraping `jobs` (targets by name) every half second."""

    def __init__(self, folder: Path, jobs: dict[str, list[str]]) -> None:
        binary = shutil.which("prometheus")
        if binary is None:
            pytest.skip("prometheus is not installed")
        scrapes = [
            {"job_name": job, "scrape_interval": "500ms", "scrape_timeout": "500ms", "static_configs": [{"targets": t}]}
            for job, t in jobs.items()
        ]
        config = folder / "prometheus.yml"
        config.write_text(re.sub("'", '"', str({"scrape_configs": scrapes})))  # YAML takes JSON
        with contextlib.closing(HeldPort(LOCAL)) as held:
            address = held.address
        flags = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}"]
        self._log = (folder / "prometheus.log").open("w+")
        self._process = subprocess.Popen([binary, *flags, "--log.level=warn"], stdout=self._log, stderr=self._log)
        self._http = httpx.Client(base_url=f"http://{address}", timeout=WAIT_S)

    def ask(self, query: str) -> dict[str, float]:
        """Values by the labels that the query leaves; empty while it is not up."""
        try:
            answer = self._http.get("/api/v1/query", params={"query": query})
            found = answer.json()["data"]["result"] if answer.status_code == 200 else []
        except httpx.TransportError:
            found = []
        return {",".join(result["metric"].values()): float(result["value"][1]) for result in found}

    def wait_for(self, query: str, wanted: dict[str, float]) -> None:
        deadline = time.monotonic() + WAIT_S
        while (said := self.ask(query)) != wanted:
            assert self._process.poll() is None, self._last_words()
            assert time.monotonic() < deadline, f"{query}: {said}, not {wanted}; {self._last_words()}"
            time.sleep(0.05)  # it tells nobody that it has scraped

    def close(self) -> None:
        self._http.close()
        self._process.terminate()
        self._process.wait(WAIT_S)
        self._log.close()

    def _last_words(self) -> str:
        self._log.seek(0)
        return self._log.read()[-2000:]


@contextlib.contextmanager
def scraped(folder: Path, pages: list[str]) -> Iterator[tuple[Prometheus, dict[str, set[str]]]]:
    """Prometheus in front of these, as it asks for them itself (OpenMetrics), and in plain text; and the types got."""
    accepts = {"openmetrics": None, "plain": "text/plain;version=0.0.4"}
    with contextlib.ExitStack() as stack:
        jobs: dict[str, list[Forwarder]] = {}
        for job, accept in accepts.items():
            jobs[job] = [stack.enter_context(contextlib.closing(Forwarder(url, accept))) for url in pages]
        targets = {job: [forwarder.target for forwarder in forwarders] for job, forwarders in jobs.items()}
        prometheus = stack.enter_context(contextlib.closing(Prometheus(folder, targets)))
        kinds = {job: forwarders[0].kinds for job, forwarders in jobs.items()}
        yield prometheus, kinds


async def test_a_real_prometheus_reads_both_formats_alike(router: Router, client, tmp_path: Path) -> None:
    response = await client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 2})
    usage = response.json()["usage"]
    with contextlib.ExitStack() as stack:
        nodes = [MetricsServer(LOCAL, node_registry(role), {}, {}, AdminGate()) for role in ("prefill", "decode")]
        for node in nodes:
            stack.callback(node.close)
        urls = [f"{router.http}/metrics", *(f"http://{node.address}/metrics" for node in nodes)]
        await asyncio.to_thread(check_with_prometheus, tmp_path, urls, usage)


def check_with_prometheus(folder: Path, urls: list[str], usage: dict[str, int]) -> None:
    with scraped(folder, urls) as (prometheus, kinds):

        def both(value: float) -> dict[str, float]:
            return {"openmetrics": value, "plain": value}

        prometheus.wait_for("sum by (job) (up)", both(3))
        prometheus.wait_for("sum by (job) (baton:prompt_tokens_total)", both(usage["prompt_tokens"]))
        prometheus.wait_for("sum by (job) (baton:generation_tokens_total)", both(usage["completion_tokens"]))
        prometheus.wait_for("sum by (job) (baton:request_ends_total)", both(1))
        prometheus.wait_for("sum by (job) (baton:node_prompt_tokens_total)", both(10))
        prometheus.wait_for("sum by (job) (baton:e2e_request_latency_seconds_count)", both(1))
        by_role = {f"{job},{role}": 1.0 for job in ("openmetrics", "plain") for role in ("router", "prefill", "decode")}
        prometheus.wait_for("count by (job, role) (baton:build_info)", by_role)
        assert prometheus.ask('count({__name__!~"up|scrape_.*", role=""})') == {}
        assert prometheus.ask('count({__name__!~"up|scrape_.*|process_.*|baton:.*|vllm:.*"})') == {}
        names = {job: prometheus.ask(f'count by (__name__) ({{job="{job}"}})') for job in kinds}
        assert names["plain"] == names["openmetrics"]
        assert kinds == {"openmetrics": {"application/openmetrics-text"}, "plain": {"text/plain"}}
