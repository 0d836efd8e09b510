"""The chart's pods as processes in network namespaces: names that are looked up, and policies that hold."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.deploy import namespaces
from tests.deploy.namespaces import Host, Network, arguments
from tests.deploy.test_chart import of_kind, template_of, workloads
from tests.e2e.cluster import wait_until
from tools.render_chart import NAMESPACE

WHY_NOT = namespaces.why_not()
pytestmark = [
    pytest.mark.skipif(bool(WHY_NOT), reason=f"no namespaces: this machine {WHY_NOT}"),
    pytest.mark.timeout(300),
]

HTTP, NODE, METRICS = 8000, 9000, 9100
REFUSED_S = 0.5
"""Packets that a policy drops are never answered."""


@dataclass
class Pods:
    """The chart's objects at work, of a set of values. `ready`: the nodes that a headless service's name stands for."""

    network: Network
    values: str = "tiny"
    ready: dict[str, list[Host]] = field(default_factory=lambda: {"prefill": [], "decode": []})

    def start(self, component: str, number: int) -> Host:
        """A pod. `serve` makes it known."""
        template = template_of(workloads(self.values)[component])
        (container,) = template["spec"]["containers"]
        host = self.network.add(f"baton-{component}-{number}", NAMESPACE, template["metadata"]["labels"])
        host.start(*arguments(container, host))
        return host

    def serve(self, component: str, host: Host) -> None:
        """Name it, once its probe finds it ready."""
        wait_until(lambda: why_not_there(host, f"http://{host.address}:{METRICS}/health"), 90)
        self.ready[component].append(host)
        self.resolve()

    def resolve(self) -> None:
        names = {f"baton-{component}.{NAMESPACE}.svc": hosts for component, hosts in self.ready.items()}
        self.network.resolve(names)

    def enforce(self) -> None:
        ports = {
            component: {p["name"]: p["containerPort"] for p in template_of(made)["spec"]["containers"][0]["ports"]}
            for component, made in workloads(self.values).items()
        }
        self.network.enforce(of_kind(self.values, "NetworkPolicy"), ports)


def why_not_there(host: Host, url: str) -> str | None:
    if host.process is not None and host.process.poll() is not None:
        return f"{host.name} has ended: {host.log.read_text()[-2000:]}"
    try:
        get(host, url)
    except httpx.HTTPError as error:
        return f"{url}: {error}"
    return None


def why_degraded(source: Host, url: str) -> str | None:
    """A router without a prefill node answers, too."""
    status: str = get(source, f"{url}/ready")["status"]
    return None if status == "ready" else status


def get(source: Host, url: str, body: dict[str, Any] | None = None) -> Any:
    """What that host gets, of JSON or text."""

    def call() -> httpx.Response:
        with httpx.Client(timeout=60, trust_env=False) as client:
            return client.request("GET" if body is None else "POST", url, json=body)

    answer = source.within(call).raise_for_status()
    return answer.json() if answer.headers["content-type"] == "application/json" else answer.text


def reaches(source: Host, target: Host, port: int) -> bool:
    def connect() -> bool:
        try:
            socket.create_connection((target.address, port), timeout=REFUSED_S).close()
        except TimeoutError:
            return False
        return True

    return source.within(connect)


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    with Network(tmp_path_factory.mktemp("pods")) as network:
        yield Pods(network)


def test_the_chart_serves_where_its_policies_hold(pods: Pods) -> None:
    client, prometheus = (pods.network.add(name, name, {}) for name in ("client", "monitoring"))
    router, prefill, decode = (pods.start(component, 0) for component in ("router", "prefill", "decode"))
    pods.enforce()
    for component, host in (("prefill", prefill), ("decode", decode)):
        pods.serve(component, host)
    url = f"http://{router.address}:{HTTP}"
    wait_until(lambda: why_not_there(client, f"{url}/ready") or why_degraded(client, url), 60)

    assert answer(client, url) == (prefill.name, decode.name)

    allowed = {
        (client, router, HTTP): True,
        (client, prefill, NODE): False,
        (client, decode, METRICS): False,
        (router, prefill, NODE): True,
        (router, decode, NODE): True,
        (router, decode, METRICS): False,
        (router, client, HTTP): False,
        (prefill, decode, NODE): True,
        (decode, prefill, NODE): True,
        (decode, router, HTTP): False,
        (prometheus, decode, NODE): False,
    }
    assert {way: way_is_open(*way) for way in allowed} == allowed
    assert "baton:" in get(prometheus, f"http://{decode.address}:{METRICS}/metrics")


def way_is_open(source: Host, target: Host, port: int) -> bool:
    try:
        return reaches(source, target, port)
    except ConnectionRefusedError:  # nobody listens: the packet came through
        return True


@pytest.mark.full
def test_a_name_stands_for_the_pods_that_are_ready(pods: Pods) -> None:
    """A second decode node comes, and the first one goes."""
    client = pods.network.hosts[0]
    (router,) = [host for host in pods.network.hosts if host.name == "baton-router-0"]
    url = f"http://{router.address}:{HTTP}"
    second = pods.start("decode", 1)
    pods.enforce()
    pods.serve("decode", second)
    wait_until(lambda: None if nodes(client, url) == {"baton-decode-0", "baton-decode-1"} else "not both", 60)
    first = pods.ready["decode"].pop(0)
    pods.resolve()
    assert first.stop() == 0
    wait_until(lambda: None if nodes(client, url) == {second.name} else "still two", 60)
    assert answer(client, url) == ("baton-prefill-0", second.name)
    assert router.stop() == 0


def nodes(client: Host, url: str) -> set[str]:
    found = get(client, f"{url}/debug/nodes")
    return {node["node_id"] for node in found["nodes"] if node["role"] == "decode" and node["state"] == "up"}


def answer(client: Host, url: str) -> tuple[str, str]:
    """The nodes that served a request."""
    made = get(client, f"{url}/v1/completions", {"prompt": "Once upon a time", "max_tokens": 8})
    assert made["usage"]["completion_tokens"] > 1
    (shown,) = get(client, f"{url}/debug/requests?limit=1")["requests"]
    return shown["prefill_node"], shown["decode_node"]
