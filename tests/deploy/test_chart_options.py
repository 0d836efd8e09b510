"""What the Helm chart makes if asked to: pools of LeaderWorkerSets, TLS between pods, a gateway's endpoint picker."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from node.settings import NodeSettings
from router.settings import RouterSettings
from tests.deploy.test_chart import (
    CLUSTER_NAMES,
    DEPLOY,
    HELM,
    NO_NODES,
    Object,
    matches,
    of_kind,
    pods,
    settings_of,
    template_of,
    workloads,
)
from tools.metrics_page import router_registry

PICKER_READS = {
    "vllm:num_requests_waiting",
    "vllm:num_requests_running",
    "vllm:kv_cache_usage_perc",
    "vllm:lora_requests_info",
    "vllm:cache_config_info",
}
"""What llm-d's picker asks of each endpoint unless it is told otherwise (v0.10.0, pkg/epp/server/options.go); what it
misses it logs at each look."""
needs_helm = pytest.mark.skipif(HELM is None, reason="helm is not installed")


# ---- pools of LeaderWorkerSets ----


def test_groups_have_one_pod_each_and_leave_the_headless_service_to_the_chart() -> None:
    groups = of_kind("groups", "LeaderWorkerSet")
    assert {made["metadata"]["name"] for made in groups} == {"baton-prefill", "baton-decode"}
    assert not of_kind("groups", "StatefulSet")
    services = {made["metadata"]["name"] for made in of_kind("groups", "Service")}
    for made in groups:
        group = made["spec"]["leaderWorkerTemplate"]
        assert group["size"] == 1
        assert "leaderTemplate" not in group  # then leaders are made as workers are
        assert group["restartPolicy"] == "None"
        assert made["spec"]["networkConfig"] == {"subdomainPolicy": "Shared"}
        assert made["metadata"]["name"] in services


def test_a_pod_of_a_group_is_what_a_pod_of_a_stateful_set_is() -> None:
    """But for what the sets of values have different."""
    group, single = (template_of(workloads(name)["decode"])["spec"] for name in ("groups", "default"))
    same = ("startupProbe", "livenessProbe", "readinessProbe", "ports", "securityContext")
    for key in same:
        assert group["containers"][0][key] == single["containers"][0][key]
    for key in ("securityContext", "automountServiceAccountToken", "enableServiceLinks"):
        assert group[key] == single[key]


def test_keda_scales_groups_by_their_own_kind() -> None:
    (scaled,) = of_kind("groups", "ScaledObject")
    target = workloads("groups")["decode"]
    wanted = {"apiVersion": target["apiVersion"], "kind": target["kind"], "name": target["metadata"]["name"]}
    assert scaled["spec"]["scaleTargetRef"] == wanted
    assert "replicas" not in target["spec"]
    assert workloads("groups")["prefill"]["spec"]["replicas"] == 3


# ---- variables of nodes ----


def test_variables_are_those_of_nodes_alone() -> None:
    given = {"name": "NCCL_SOCKET_IFNAME", "value": "eth0"}
    assert {component: given in made["env"] for component, _, made in pods("everything")} == {
        "router": False,
        "decode": True,
    }


# ---- TLS between routers and nodes ----


def named(host: str) -> bool:
    """Whether the certificate of the documentation names the host."""
    names = [name.removeprefix("DNS:") for name in CLUSTER_NAMES.split(",")]
    return any(re.fullmatch(re.escape(name).replace(r"\*", "[^.]+"), host) for name in names)


@pytest.mark.parametrize("name", ["everything", "groups", "hosts"])
def test_with_tls_all_show_one_certificate_and_are_reached_by_names_in_it(name: str, tmp_path: Path) -> None:
    router = settings_of(name, "router", tmp_path)
    assert isinstance(router, RouterSettings)
    shown = router.trust().tls
    assert shown is not None
    looked_up = [*router.prefill_dns, *router.decode_dns]
    assert looked_up
    assert all(named(found.host) for found in looked_up)
    for component in workloads(name).keys() - NO_NODES:
        node = settings_of(name, component, tmp_path)
        assert isinstance(node, NodeSettings)
        its = node.trust().tls
        assert its is not None
        assert its.current() == shown.current()
        assert node.advertise is not None
        assert node.advertise.host == f"baton-{component}-0.baton-{component}.serving.svc"
        assert named(node.advertise.host)
        assert node.advertise.port == node.listen.port


@pytest.mark.parametrize("name", ["default", "gpu"])
def test_without_it_nodes_are_reached_at_their_addresses(name: str, tmp_path: Path) -> None:
    node = settings_of(name, "decode", tmp_path)
    assert isinstance(node, NodeSettings)
    assert node.trust().tls is None
    assert node.advertise is None


@pytest.mark.parametrize("name", ["everything", "groups", "hosts"])
def test_probes_need_no_certificate(name: str) -> None:
    for component, _, container in pods(name):
        asked = [probe for key, probe in container.items() if key.endswith("Probe")]
        ports = {(probe.get("httpGet") or probe["tcpSocket"])["port"] for probe in asked}
        assert ports == {"http" if component == "router" else "metrics"}  # TLS between nodes is that of `grpc`


def test_the_documentation_has_the_names_of_the_certificate() -> None:
    text = (DEPLOY.parent / "docs" / "kubernetes.md").read_text()
    assert all(name.removeprefix("DNS:") in text for name in CLUSTER_NAMES.split(","))


# ---- behind a gateway ----


@pytest.mark.parametrize("name", ["everything", "groups"])
def test_the_pool_is_of_routers_and_the_route_leads_to_it(name: str) -> None:
    (pool,) = of_kind(name, "InferencePool")
    by_component = workloads(name)
    labels = pool["spec"]["selector"]["matchLabels"]
    assert [each for each, made in by_component.items() if matches(labels, made)] == ["router"]
    (port,) = pool["spec"]["targetPorts"]
    (container,) = template_of(by_component["router"])["spec"]["containers"]
    assert {"name": "http", "containerPort": port["number"]} in container["ports"]
    (route,) = of_kind(name, "HTTPRoute")
    (rule,) = route["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    assert (backend["kind"], backend["name"]) == (pool["kind"], pool["metadata"]["name"])
    assert backend["group"] == pool["apiVersion"].partition("/")[0]
    assert rule["timeouts"] == {"request": "0s"}


def picker() -> tuple[Object, Object]:
    """Its pod's spec and its container."""
    ((pod, container),) = [
        (pod, made) for component, pod, made in pods("everything", "picker") if component == "picker"
    ]
    return pod, container


def test_the_pool_names_the_picker_s_service() -> None:
    (pool,) = of_kind("everything", "InferencePool")
    ref = pool["spec"]["endpointPickerRef"]
    (service,) = [made for made in of_kind("everything", "Service") if made["metadata"]["name"] == ref["name"]]
    (port,) = [port for port in service["spec"]["ports"] if port["port"] == ref["port"]["number"]]
    _, container = picker()
    assert port["targetPort"] in {each["name"] for each in container["ports"]}
    flags = dict(flag.split("=", 1) for flag in container["args"])
    assert flags["--pool-name"] == pool["metadata"]["name"]
    assert flags["--config-file"].startswith(container["volumeMounts"][0]["mountPath"])


def test_a_picker_that_is_there_is_named_and_none_is_made() -> None:
    (pool,) = of_kind("groups", "InferencePool")
    assert (pool["spec"]["endpointPickerRef"]["name"], pool["spec"]["endpointPickerRef"]["port"]) == (
        "picker",
        {"number": 9100},
    )
    assert "picker" not in workloads("groups")
    assert not of_kind("groups", "Role", "RoleBinding")
    assert not of_kind("default", "Role", "RoleBinding", "HTTPRoute", "InferencePool", "LeaderWorkerSet")


def test_the_picker_s_configuration_uses_what_it_declares_and_reads_routers_as_they_serve() -> None:
    pod, container = picker()
    (volume,) = pod["volumes"]
    (config_map,) = [
        made for made in of_kind("everything", "ConfigMap") if made["metadata"]["name"] == volume["configMap"]["name"]
    ]
    file = dict(flag.split("=", 1) for flag in container["args"])["--config-file"].rpartition("/")[2]
    config = yaml.safe_load(config_map["data"][file])
    plugins = {plugin["type"]: plugin.get("parameters", {}) for plugin in config["plugins"]}
    (profile,) = config["schedulingProfiles"]
    used = [*profile["plugins"], *config["requestHandler"]["parsers"], config["flowControl"]["saturationDetector"]]
    assert {each["pluginRef"] for each in used} <= plugins.keys()
    router = next(made for component, _, made in pods("everything") if component == "router")
    assert plugins["metrics-data-source"]["scheme"].upper() == router["readinessProbe"]["httpGet"]["scheme"]


def test_routers_have_the_metrics_that_the_picker_reads() -> None:
    served = {sample.name for metric in router_registry().collect() for sample in metric.samples}
    assert served >= PICKER_READS


def test_the_picker_may_read_and_nothing_else() -> None:
    pod, container = picker()
    (role,) = of_kind("everything", "Role")
    (binding,) = of_kind("everything", "RoleBinding")
    assert {verb for rule in role["rules"] for verb in rule["verbs"]} == {"get", "list", "watch"}
    assert {kind for rule in role["rules"] for kind in rule["resources"]} >= {"pods", "inferencepools"}
    assert "secrets" not in str(role)
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    (subject,) = binding["subjects"]
    assert subject["name"] == pod["serviceAccountName"] != "baton"
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
