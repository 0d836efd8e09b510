"""Pools of the Helm chart whose nodes are spread over several pods each: groups of a LeaderWorkerSet."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from baton.address import HostPort
from deploy.ports import HeldPort
from node.ranks.joining import shared_flags
from node.settings import NodeSettings
from tests.deploy.commands import put_file
from tests.deploy.namespaces import Host, arguments, why_not
from tests.deploy.spawned import python_path
from tests.deploy.test_chart import (
    HELM,
    of_kind,
    opens,
    pods,
    settings_in,
    settings_of,
    template_of,
    workers,
    workloads,
)
from tests.e2e.cluster import wait_until
from tools.render_chart import CHART, NAMESPACE

ROLES = ("prefill", "decode")
LEADERS = {"leaderworkerset.sigs.k8s.io/worker-index": "0"}
each_role = pytest.mark.parametrize("role", ROLES)
WHY_NO_CONTAINER = why_not("--pid", "unshare")
needs_helm = pytest.mark.skipif(HELM is None, reason="helm is not installed")


def lws_variables(role: str, group: int, index: int) -> dict[str, str]:
    """What the controller adds to a container of a pod (v0.9.0, pkg/utils/pod/pod_utils.go): a leader's name in DNS is
    that of the pod in the Service that is called as the set is."""
    leader = f"baton-{role}-{group}.baton-{role}.{NAMESPACE}"
    return {"LWS_LEADER_ADDRESS": leader, "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": str(index)}


def worker_of(role: str, folder: Path) -> NodeSettings:
    ((pod, container),) = [(pod, container) for each, pod, container in workers("hosts") if each == role]
    own = {"POD_NAME": f"baton-{role}-0-1", "POD_IP": "10.0.0.8"}
    settings = settings_in(pod, container, own | lws_variables(role, 0, 1), folder)
    assert isinstance(settings, NodeSettings)
    return settings


def leader_of(role: str, folder: Path) -> NodeSettings:
    settings = settings_of("hosts", role, folder)
    assert isinstance(settings, NodeSettings)
    return settings


@each_role
def test_the_pods_of_a_group_are_the_hosts_of_a_node(role: str, tmp_path: Path) -> None:
    leader, worker = leader_of(role, tmp_path), worker_of(role, tmp_path)
    size = workloads("hosts")[role]["spec"]["leaderWorkerTemplate"]["size"]
    assert (leader.nnodes, worker.nnodes) == (size, size)
    assert (leader.node_rank, worker.node_rank) == (0, 1)
    assert [*leader.host_ranks, *worker.host_ranks] == list(range(leader.num_ranks))
    assert shared_flags(leader) == shared_flags(worker)  # else the leader refuses it


@each_role
def test_workers_come_to_the_leader_by_name_and_it_listens_at_its_address(role: str, tmp_path: Path) -> None:
    """DNS has a leader's name later than its pod begins; workers try again until it has."""
    leader, worker = leader_of(role, tmp_path), worker_of(role, tmp_path)
    assert leader.master_addr == leader.listen.host
    assert worker.master_addr == f"baton-{role}-0.baton-{role}.{NAMESPACE}"
    assert leader.master_port == worker.master_port
    (names,) = [made["spec"] for made in of_kind("hosts", "Service") if made["metadata"]["name"] == f"baton-{role}"]
    assert names["clusterIP"] == "None"
    assert names["publishNotReadyAddresses"]  # they meet before the node is ready
    assert [port["port"] for port in names["ports"]] == [leader.master_port]


@each_role
def test_hosts_wait_for_each_other_nearly_as_long_as_the_startup_probe(role: str, tmp_path: Path) -> None:
    """So that the log says which one is missing; and less would begin a group anew whose pods wait for machines."""
    container = template_of(workloads("hosts")[role])["spec"]["containers"][0]
    probed_s = container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"]
    for settings in (leader_of(role, tmp_path), worker_of(role, tmp_path)):
        assert 0.8 * probed_s <= settings.distributed_timeout_seconds < probed_s


@each_role
def test_a_group_is_recreated_as_a_whole_and_its_workers_do_not_wait_for_a_leader_that_waits_for_them(
    role: str,
) -> None:
    made = workloads("hosts")[role]["spec"]
    assert made["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert made["startupPolicy"] == "LeaderCreated"
    assert made["networkConfig"] == {"subdomainPolicy": "Shared"}
    assert made["rolloutStrategy"]["rollingUpdateConfiguration"] == {"maxUnavailable": 1, "maxSurge": 0}


@each_role
def test_workers_are_like_leaders_without_ports_and_pages(role: str) -> None:
    ((leader, there),) = [(pod, container) for each, pod, container in pods("hosts") if each == role]
    ((worker, here),) = [(pod, container) for each, pod, container in workers("hosts") if each == role]
    assert not {"ports", "startupProbe", "livenessProbe", "readinessProbe"} & here.keys()
    for key in ("image", "env", "resources", "securityContext"):
        assert here[key] == there[key]
    assert worker["terminationGracePeriodSeconds"] == leader["terminationGracePeriodSeconds"]
    assert "/etc/baton/cluster-tls" not in str(here)  # of the node's address, which they have none of


def test_routers_find_leaders_alone_and_prometheus_scrapes_nobody_else() -> None:
    (monitor,) = of_kind("hosts", "ServiceMonitor")
    scraped = {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]}
    for made in of_kind("hosts", "Service"):
        name, spec = made["metadata"]["name"], made["spec"]
        if name.endswith("-leaders"):
            assert spec["selector"].items() >= LEADERS.items()
            assert spec["publishNotReadyAddresses"] is False
        elif name != "baton-router":
            assert not scraped & {port["name"] for port in spec["ports"]}


def test_budgets_count_nodes() -> None:
    """Evictions go pod by pod, and each that is evicted takes its node away."""
    budgets = {made["metadata"]["name"]: made["spec"] for made in of_kind("hosts", "PodDisruptionBudget")}
    assert budgets["baton-prefill"]["minAvailable"] == 2  # the pods of the one that must stay
    assert budgets["baton-decode"]["maxUnavailable"] == 1
    for role in ROLES:
        assert LEADERS.keys().isdisjoint(budgets[f"baton-{role}"]["selector"]["matchLabels"])  # workers count


def test_keda_scales_the_groups() -> None:
    (scaled,) = of_kind("hosts", "ScaledObject")
    target = workloads("hosts")["decode"]
    assert scaled["spec"]["scaleTargetRef"]["kind"] == target["kind"] == "LeaderWorkerSet"
    assert "replicas" not in target["spec"]


@each_role
def test_policies_let_the_hosts_of_a_node_and_the_nodes_of_both_pools_reach_each_other(role: str) -> None:
    allowed = {made["metadata"]["name"]: made["spec"] for made in of_kind("hosts", "NetworkPolicy")}[f"baton-{role}"]
    for peer in ROLES:
        for port in (29501, 40000):  # where they meet; what ranks and KV take
            assert opens(allowed["ingress"], "from", peer, port)
            assert opens(allowed["egress"], "to", peer, port)
    assert not opens(allowed["ingress"], "from", "router", 29501)


def several(role: str, *args: str, **values: object) -> str:
    """What `--set` takes for a pool whose nodes have two pods each."""
    pool = {"kind": "LeaderWorkerSet", "size": 2, "args": f"{{{','.join(args)}}}", **values}
    return ",".join(f"{role}.{key}={value}" for key, value in pool.items())


TENSOR, PIPELINE = "--tensor-parallel-size", "--pipeline-parallel-size"
SAID = [
    (several("decode", f"{TENSOR}=2", kind="StatefulSet"), "decode.size is 2, for which decode.kind must be Leader"),
    (several("decode", f"{TENSOR}=64", size=65), "decode.size"),
    (several("decode", "--enforce-eager"), "decode.args: a node's ranks are 1"),
    (several("decode", f"{TENSOR}=3"), "cannot be divided evenly among the pods of decode.size, 2"),
    (several("prefill", f"{TENSOR}=2", f"{PIPELINE}=3", gpus=3), "which stages of 2 do not fit"),
    (
        several("prefill", f"{TENSOR}=2", f"{PIPELINE}=3", size=3),
        "2 in each pod, which need a GPU each, and prefill.gpus",
    ),
    (several("decode", f"{TENSOR}=2", "--transport=ipc"), "--transport=ipc"),
    (several("decode", f"{TENSOR}=2", "--data-parallel-size=2"), "--data-parallel-size"),
    ("decode.args={--nnodes=2}", "decode.args has --nnodes, which the chart sets as decode.size says"),
    ("node.args={--tensor-parallel-size=2}", "prefill.gpus is 1"),
    (several("decode", f"{TENSOR}=2"), ""),
    (several("decode", f"{TENSOR}=4", gpus=2), ""),
    (several("prefill", f"{TENSOR}=2", f"{PIPELINE}=3", size=3, gpus=2), ""),
    (several("decode", "--config=/models/flags.yaml"), ""),
    ("node.device=cpu,node.args={--tensor-parallel-size=2}", ""),
]
"""Values, and what helm says to them; nothing: it takes them."""


@needs_helm
@pytest.mark.parametrize(("values", "why"), SAID)
def test_what_pods_cannot_be_is_refused_by_name(values: str, why: str) -> None:
    command = [str(HELM), "template", "baton", str(CHART), "--set", values]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode == 0) == (not why), ran.stderr
    assert why in ran.stderr.replace("/", ".")  # helm 4 separates a value's names by slashes


def why_not_said(host: Host, text: str) -> str | None:
    assert host.process is not None
    assert host.process.poll() is None, host.log.read_text()
    return None if text in host.log.read_text() else f"{host.name} has not said {text!r}"


@pytest.mark.skipif(bool(WHY_NO_CONTAINER), reason=f"no namespaces: this machine {WHY_NO_CONTAINER}")
def test_a_pod_that_waits_for_its_leader_ends_when_it_is_told_to(tmp_path: Path) -> None:
    """Its process is the first of a container, from which the kernel keeps signals that it does not handle."""
    container = next(container for role, _, container in workers("hosts") if role == "decode")
    put_file(tmp_path, "etc/baton/cluster/secret")
    pod = Host("baton-decode-0-1", "127.0.0.1", "", NAMESPACE, {}, tmp_path / "hosts", tmp_path / "log")
    variables = lws_variables("decode", 0, 1) | {"LWS_LEADER_ADDRESS": "127.0.0.1"}
    command, env = arguments(container, pod, variables, tmp_path)
    inside = ["unshare", "--pid", "--fork", "--kill-child"]
    with HeldPort(HostPort("127.0.0.1", 0)) as nobody, pod.log.open("wb") as log:
        command = [text.replace("29501", str(nobody.address.port)) for text in command]
        pod.process = subprocess.Popen([*inside, *command], stdout=log, stderr=log, env=python_path() | env)
        try:
            wait_until(lambda: why_not_said(pod, "coming to rank 0"), 60)
            (first,) = Path(f"/proc/{pod.process.pid}/task/{pod.process.pid}/children").read_text().split()
            os.kill(int(first), signal.SIGTERM)
            assert pod.wait(20.0) == 128 + signal.SIGTERM
        finally:
            pod.process.kill()
            pod.process.wait()
