"""Groups of the chart's pods as processes in network namespaces: nodes on several hosts that meet by name."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.deploy import namespaces
from tests.deploy.commands import put_file
from tests.deploy.namespaces import Host, Network, arguments
from tests.deploy.test_chart import certificates, template_of, workloads
from tests.deploy.test_chart_hosts import LEADERS, ROLES, lws_variables, why_not_said
from tests.deploy.test_namespaces import HTTP, METRICS, NODE, Pods, answer, get, way_is_open, why_not_there
from tests.e2e.cluster import wait_until
from tools.render_chart import NAMESPACE

WHY_NOT = namespaces.why_not()
pytestmark = [
    pytest.mark.skipif(bool(WHY_NOT), reason=f"no namespaces: this machine {WHY_NOT}"),
    pytest.mark.timeout(300),
]

MASTER = 29501
NUM_TOKENS = 150
ENDS_S = 20.0


@dataclass
class Groups(Pods):
    """Of two pods each, as the controller of LeaderWorkerSets makes them. files: what secrets have."""

    values: str = "hosts"
    files: Path = Path()
    named: dict[str, Host] = field(default_factory=dict)
    """Pods whose own names are known."""

    def start(self, component: str, number: int, worker: int = 0) -> Host:
        made = workloads(self.values)[component]
        template = made["spec"]["leaderWorkerTemplate"]["workerTemplate"] if worker else template_of(made)
        (container,) = template["spec"]["containers"]
        name = f"baton-{component}-{number}" + (f"-{worker}" if worker else "")
        labels = template["metadata"]["labels"] | dict.fromkeys(LEADERS, str(worker))
        host = self.network.add(name, NAMESPACE, labels)
        variables = lws_variables(component, number, worker) if component in ROLES else None
        host.start(*arguments(container, host, variables, self.files))
        return host

    def start_groups(self, *roles: str) -> list[tuple[Host, Host]]:
        """A leader and a worker of each, which are ready."""
        pods = [(self.start(role, 0), self.start(role, 0, worker=1)) for role in roles]
        self.enforce()
        for leader, worker in pods:
            wait_until(partial(why_not_said, worker, "coming to rank 0"), 90)
            self.named[leader.name] = leader
        self.resolve()  # DNS has the names of pods later than they begin
        for role, (leader, _) in zip(roles, pods, strict=True):
            self.serve(role, leader)
        return pods

    def resolve(self) -> None:
        names = {f"baton-{component}-leaders.{NAMESPACE}.svc": hosts for component, hosts in self.ready.items()}
        for host in self.named.values():
            own = f"{host.name}.baton-{host.labels['app.kubernetes.io/component']}.{NAMESPACE}"
            names |= {own: [host], f"{own}.svc": [host]}
        self.network.resolve(names)


@pytest.fixture
def groups(tmp_path: Path) -> Iterator[Groups]:
    put_file(tmp_path, "etc/baton/cluster/secret")
    for at, made in zip(("tls.key", "tls.crt", "ca.crt"), certificates(), strict=True):
        put_file(tmp_path, f"etc/baton/cluster-tls/{at}", made)
    with Network(tmp_path) as network:
        yield Groups(network, files=tmp_path)


@pytest.mark.full
def test_groups_of_pods_are_nodes_that_begin_anew_as_a_whole_and_lose_nothing_when_they_are_stopped(
    groups: Groups,
) -> None:
    client = groups.network.add("client", "client", {})
    router = groups.start("router", 0)
    (prefill, prefill_worker), (decode, decode_worker) = groups.start_groups(*ROLES)
    url = f"http://{router.address}:{HTTP}"
    wait_until(lambda: why_not_there(client, f"{url}/ready"), 60)

    assert answer(client, url) == (prefill.name, decode.name)
    allowed = {
        (decode_worker, decode, MASTER): True,
        (prefill_worker, decode, NODE): True,
        (prefill, decode_worker, 40000): True,
        (router, decode, NODE): True,
        (router, decode, MASTER): False,
        (client, decode, MASTER): False,
        (client, decode_worker, METRICS): False,
    }
    assert {way: way_is_open(*way) for way in allowed} == allowed

    decode_worker.signal(signal.SIGKILL)
    assert decode.wait(ENDS_S) == 1
    groups.ready["decode"].clear()
    ((decode, decode_worker),) = groups.start_groups("decode")  # all of it is made anew, at other addresses
    wait_until(lambda: why_not_there(client, f"{url}/ready"), 60)

    asked = {"prompt": "Once upon a time", "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
    whole = get(client, f"{url}/v1/completions", asked)["choices"][0]["text"]
    assert streamed_while_stopped(client, url, asked, decode_worker, decode) == whole
    prefill_worker.signal(signal.SIGTERM)
    assert [host.wait(ENDS_S) for host in (decode, decode_worker, prefill, prefill_worker)] == [0] * 4
    assert router.stop() == 0


def streamed_while_stopped(client: Host, url: str, asked: dict[str, object], *stopped: Host) -> str:
    """The text of a stream during which all these are told to stop, as when a pod of a group is evicted."""

    def call() -> str:
        text = ""
        with (
            httpx.Client(timeout=60, trust_env=False) as http,
            http.stream("POST", f"{url}/v1/completions", json={**asked, "stream": True}) as answered,
        ):
            lines = (line.removeprefix("data: ") for line in answered.raise_for_status().iter_lines() if line)
            for number, line in enumerate(lines):
                if number == 2:
                    for host in stopped:
                        host.signal(signal.SIGTERM)
                text += "" if line == "[DONE]" else json.loads(line)["choices"][0]["text"]
        return text

    return client.within(call)
