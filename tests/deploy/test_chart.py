"""The Helm chart, as helm renders it for several values (tests/deploy/rendered): objects that Kubernetes accepts, that
fit together, and that start commands with flags and probes that there are."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

import baton
from baton.settings import Settings
from node.settings import NodeSettings
from node.shell import GRACE_S, THREAD_STOP_S
from router.http.access import ALIVE
from router.settings import RouterSettings
from tests.certificates import make_certificate
from tests.deploy.commands import parsed, put_file
from tests.deploy.test_monitoring import PROMTOOL, known, needs_promtool
from tools import render_chart
from tools.render_chart import CHART, NAMESPACE, RENDERED, VALUES

DEPLOY = CHART.parents[1]
HELM = render_chart.find_helm()
_FILES = [
    json.loads((Path(__file__).parent / f"{name}.json").read_text()) for name in ("kubernetes-1.34", "custom-resources")
]
SCHEMAS: dict[str, dict[str, Any]] = {part: _FILES[0][part] | _FILES[1][part] for part in ("kinds", "definitions")}
Object = dict[str, Any]
UNCHECKED_KINDS = {
    "monitoring.coreos.com/v1 ServiceMonitor",
    "monitoring.coreos.com/v1 PrometheusRule",
    "keda.sh/v1alpha1 ScaledObject",
}
NO_NODES = {"router", "picker"}
CLUSTER_NAMES = ",".join(
    f"DNS:{name}.serving.svc"
    for pool in ("baton-prefill", "baton-decode")
    for name in (pool, f"{pool}-leaders", f"*.{pool}")
)
"""What docs/kubernetes.md says that the certificate between routers and nodes must name."""
every_set = pytest.mark.parametrize("name", VALUES)


@cache
def objects(name: str) -> tuple[Object, ...]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return tuple(made for made in yaml.load_all((RENDERED / f"{name}.yaml").read_text(), loader) if made)


def of_kind(name: str, *kinds: str) -> list[Object]:
    return [made for made in objects(name) if made["kind"] in kinds]


def workloads(name: str) -> dict[str, Object]:
    """What makes pods, by component: router, prefill, decode, picker."""
    found = of_kind(name, "Deployment", "StatefulSet", "LeaderWorkerSet")
    return {template_of(made)["metadata"]["labels"]["app.kubernetes.io/component"]: made for made in found}


def template_of(workload: Object) -> Object:
    """Of its pods; of groups of several, of their leaders."""
    spec: Object = workload["spec"]
    group: Object = spec.get("leaderWorkerTemplate", {})
    template: Object = spec.get("template") or group.get("leaderTemplate") or group["workerTemplate"]
    return template


def pods(name: str, *others: str) -> Iterator[tuple[str, Object, Object]]:
    """(component, pod's spec, its container), of baton's own processes and of `others`"""
    for component, made in workloads(name).items():
        if component in ("router", "prefill", "decode", *others):
            pod = template_of(made)["spec"]
            (container,) = pod["containers"]
            yield component, pod, container


def workers(name: str) -> Iterator[tuple[str, Object, Object]]:
    """Likewise, those of groups of several pods that are not leaders."""
    for component, made in workloads(name).items():
        group = made["spec"].get("leaderWorkerTemplate", {})
        if "leaderTemplate" in group:
            pod = group["workerTemplate"]["spec"]
            (container,) = pod["containers"]
            yield component, pod, container


def matches(selector: dict[str, str], made: Object) -> bool:
    return selector.items() <= template_of(made)["metadata"]["labels"].items()


def in_order(text: str) -> list[Object]:
    loaded = yaml.load_all(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return sorted((made for made in loaded if made), key=lambda made: (made["kind"], made["metadata"]["name"]))


@every_set
def test_what_is_rendered_is_of_the_chart_as_it_is(name: str) -> None:
    first, _, rest = (RENDERED / f"{name}.yaml").read_text().partition("\n")
    assert first + "\n" == render_chart.head(name), "stale: run `python -m tools.render_chart`, with helm installed"
    if HELM is not None:  # another version of helm may write the same objects otherwise
        assert in_order(render_chart.render(HELM, VALUES[name])) == in_order(rest)


@pytest.mark.skipif(HELM is None, reason="helm is not installed")
@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("decode.gpus=x", "decode.gpus"),
        ("router.replicas=0", "router.replicas"),
        ("decode.nosuch=1", "nosuch"),
        ("clusterSecret.value=short", "clusterSecret.value"),
        ("router.args={policy=prefix}", "router.args"),
        ("decode.env.BATON_DEVICE=cpu", "BATON_DEVICE"),
    ],
)
def test_helm_refuses_values_that_the_schema_does_not_allow(value: str, complaint: str) -> None:
    ran = subprocess.run(
        [str(HELM), "template", "baton", str(CHART), "--set", value],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode != 0
    assert complaint in ran.stderr.replace("/", ".")  # helm 4 separates a value's names by slashes


def test_the_values_that_come_with_the_chart_match_its_schema() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema_rs.validate(schema, defaults)
    assert schema["properties"].keys() - {"global"} == defaults.keys()
    for name in ("tiny", "gpu"):
        check = jsonschema_rs.validator_for(schema)
        wrong = [error.message for error in check.iter_errors(yaml.safe_load(VALUES[name].read_text()))]
        assert all("is a required property" in message for message in wrong), wrong  # the defaults have the rest


@pytest.mark.parametrize("where", ["router", "node", "prefill", "decode"])
@pytest.mark.parametrize("flag", ["drain-timeout", "http", "grpc", "listen", "metrics-port"])
def test_flags_on_which_the_rest_of_a_pod_depends_are_refused_among_args(where: str, flag: str) -> None:
    """The time before a pod is killed, and the ports of probes and services."""
    check = jsonschema_rs.validator_for(json.loads((CHART / "values.schema.json").read_text())["properties"][where])
    needed = {"replicas": 1, "autoscaling": {}} if where in ("prefill", "decode") else {}
    assert check.is_valid({**needed, "args": [f"--{flag}s=600"]})
    assert not check.is_valid({**needed, "args": [f"--{flag}=600"]})
    assert not check.is_valid({**needed, "args": [f"--{flag}", "600"]})


@every_set
def test_kubernetes_own_schemas_accept_every_object(name: str) -> None:
    for made in objects(name):
        kind = f"{made['apiVersion']} {made['kind']}"
        if kind in UNCHECKED_KINDS:
            continue
        schema = {"$ref": SCHEMAS["kinds"][kind], "definitions": SCHEMAS["definitions"]}
        jsonschema_rs.validate(schema, made)


@every_set
def test_names_are_short_and_used_once(name: str) -> None:
    made = [(each["kind"], each["metadata"]["name"]) for each in objects(name)]
    assert len(set(made)) == len(made)
    assert all(re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", each) and len(each) <= 52 for _, each in made)


@every_set
def test_selectors_find_the_pods_that_they_mean(name: str) -> None:
    by_component = workloads(name)
    for component, made in by_component.items():
        if "selector" in made["spec"]:  # a LeaderWorkerSet has labels of its own for that
            assert matches(made["spec"]["selector"]["matchLabels"], made)
        alike = of_kind(name, "PodDisruptionBudget", "NetworkPolicy", "Service")
        for other in (each for each in alike if each["metadata"]["name"].endswith(f"-{component}")):
            selector = other["spec"].get("selector", other["spec"].get("podSelector"))
            labels = selector.get("matchLabels", selector)
            assert [each for each, pod in by_component.items() if matches(labels, pod)] == [component]


@every_set
def test_each_pool_of_nodes_has_a_headless_service_that_the_routers_look_up(name: str, tmp_path: Path) -> None:
    router = settings_of(name, "router", tmp_path)
    assert isinstance(router, RouterSettings)
    looked_up = {"prefill": router.prefill_dns, "decode": router.decode_dns}
    services = {made["metadata"]["name"]: made["spec"] for made in of_kind(name, "Service")}
    nodes = {component: made for component, made in workloads(name).items() if component not in NO_NODES}
    assert nodes.keys() == {component for component, names in looked_up.items() if names}
    for component, made in nodes.items():
        (found,) = looked_up[component]
        own = made["spec"].get("serviceName", made["metadata"]["name"])  # what gives pods their names in DNS
        several = made["spec"].get("leaderWorkerTemplate", {}).get("size", 1) > 1
        assert found.host == f"{own}{'-leaders' if several else ''}.{NAMESPACE}.svc"
        service = services[found.host.partition(".")[0]]
        assert service["clusterIP"] == "None"
        assert not service["publishNotReadyAddresses"]
        assert found.port in {port["port"] for port in service["ports"]}


def settings_of(name: str, component: str, folder: Path) -> Settings:
    """What the container's command makes of its arguments, with Kubernetes' variables and the mounted files."""
    pod, container = next((pod, container) for each, pod, container in pods(name) if each == component)
    own = {"POD_NAME": f"baton-{component}-0", "POD_IP": "fd00::7" if name == "everything" else "10.0.0.7"}
    declared = {variable["name"] for variable in container["env"]}
    return settings_in(pod, container, {key: value for key, value in own.items() if key in declared}, folder)


def settings_in(pod: Object, container: Object, variables: dict[str, str], folder: Path) -> Settings:
    """variables: those that arguments may refer to."""
    for file in mounted(pod, container):
        put_file(folder, file)
    put_file(folder, "etc/baton/tls/tls.crt")
    put_file(folder, "etc/baton/tls/tls.key")
    for at, made in zip(("tls.key", "tls.crt", "ca.crt"), certificates(), strict=True):
        put_file(folder, f"etc/baton/cluster-tls/{at}", made)
    arguments = (
        container["args"] if container["name"] != "router" else ["router", *container["args"]]
    )  # as its ENTRYPOINT
    return parsed([re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], text) for text in arguments], folder)


@cache
def certificates() -> tuple[str, str, str]:
    """Key, certificate and authority, as cert-manager writes them into a Secret."""
    with tempfile.TemporaryDirectory() as folder:
        made = make_certificate(Path(folder), names=CLUSTER_NAMES)
        return made.keyfile.read_text(), made.certfile.read_text(), made.ca_certs.read_text()


def mounted(pod: Object, container: Object) -> set[str]:
    """Paths of the single files that secrets bring."""
    at = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert at.keys() == {volume["name"] for volume in pod["volumes"]}
    return {
        f"{at[volume['name']]}/{item['path']}"
        for volume in pod["volumes"]
        for item in volume.get("secret", {}).get("items", ())
    }


@every_set
def test_the_commands_know_their_flags_and_listen_on_the_ports_that_are_declared(name: str, tmp_path: Path) -> None:
    for component, pod, container in pods(name):
        settings = settings_of(name, component, tmp_path)
        declared = {port["name"]: port["containerPort"] for port in container["ports"]}
        if isinstance(settings, RouterSettings):
            assert declared == {"http": settings.http.port, "grpc": settings.grpc.port}
            assert settings.http.is_wildcard
            grace = settings.drain_timeout + container["lifecycle"]["preStop"]["sleep"]["seconds"]
        else:
            assert isinstance(settings, NodeSettings)
            master = {"master": settings.master_port} if settings.nnodes > 1 else {}
            assert declared == {"grpc": settings.listen.port, "metrics": settings.metrics_listen.port, **master}
            assert not settings.listen.is_wildcard  # others reach a node at the address it listens on
            grace = settings.drain_timeout + 2 * GRACE_S + THREAD_STOP_S
        assert pod["terminationGracePeriodSeconds"] > grace
        if settings.cluster_secret_file is not None:
            assert "/etc/baton/cluster/secret" in mounted(pod, container)


@every_set
def test_probes_ask_for_pages_that_there_are_and_none_kills_a_busy_pod(name: str) -> None:
    for component, _, container in pods(name):
        pages = set(ALIVE) if component == "router" else {"/health"}
        ports = {port["name"] for port in container["ports"]}
        probes = {
            kind: container[kind] for kind in ("startupProbe", "livenessProbe", "readinessProbe") if kind in container
        }
        for probe in probes.values():
            asked = probe.get("httpGet") or probe["tcpSocket"]
            assert asked["port"] in ports
            assert asked.get("path", "/health") in pages
        alive = probes["livenessProbe"]
        assert "tcpSocket" in alive  # the kernel answers, however busy the process is
        assert alive["periodSeconds"] * alive["failureThreshold"] >= 120
        if component != "router":
            ready, start = probes["readinessProbe"], probes["startupProbe"]
            assert ready["periodSeconds"] * ready["failureThreshold"] >= 60  # else its requests move for nothing
            assert start["periodSeconds"] * start["failureThreshold"] >= 300


@every_set
def test_pods_run_without_rights(name: str) -> None:
    account = next(made for made in of_kind(name, "ServiceAccount") if made["metadata"]["name"] == "baton")
    assert account["automountServiceAccountToken"] is False
    for component, pod, container in (*pods(name), *workers(name)):
        assert pod["serviceAccountName"] == account["metadata"]["name"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"]
        rights = container["securityContext"]
        assert rights["readOnlyRootFilesystem"]
        assert not rights["allowPrivilegeEscalation"]
        rdma = "rdma/hca" in container["resources"]["limits"]
        added = {"add": ["IPC_LOCK"]} if rdma else {}
        assert rights["capabilities"] == {"drop": ["ALL"], **added}
        assert rdma == (component != "router" and name in ("gpu", "everything"))


@every_set
def test_every_secret_that_is_mounted_is_there_or_named_by_the_values(name: str) -> None:
    made = {each["metadata"]["name"]: set(each["stringData"]) for each in of_kind(name, "Secret")}
    values = yaml.safe_load(VALUES[name].read_text())
    for _, pod, _ in (*pods(name, "picker"), *workers(name)):
        for secret in (volume["secret"] for volume in pod["volumes"] if "secret" in volume):
            if secret["secretName"] in made:
                assert {item["key"] for item in secret["items"]} <= made[secret["secretName"]]
            else:
                assert secret["secretName"] in json.dumps(values)


@every_set
def test_only_those_that_must_may_reach_a_pod(name: str) -> None:
    allowed = {made["metadata"]["name"].rpartition("-")[2]: made["spec"] for made in of_kind(name, "NetworkPolicy")}
    assert allowed.keys() == workloads(name).keys()
    nodes = allowed.keys() - NO_NODES
    for component, policy in allowed.items():
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        if component == "picker":
            assert opens(policy["egress"], "to", "router", 8000)
            assert opens(allowed["router"]["ingress"], "from", component, "http")
            assert not any(
                opens(allowed[role]["ingress"], "from", component, port) for role in nodes for port in ("grpc", 9100)
            )
            continue
        for role in nodes:  # a router's port of a node; anything between nodes
            assert opens(allowed[role]["ingress"], "from", component, "grpc")
            assert opens(policy["egress"], "to", role, 9000)
            assert opens(allowed[role]["ingress"], "from", component, 40000) == (component != "router")
            assert opens(policy["egress"], "to", role, 40000) == (component != "router")
        if component != "router":
            assert not any("from" not in rule for rule in policy["ingress"])
            assert not opens(allowed["router"]["ingress"][:1], "from", component, "http") or name != "everything"


def opens(rules: list[Object], side: str, component: str, port: int | str) -> bool:
    """Whether one of the rules lets the chart's component through at this port."""
    for rule in rules:
        ports = [each["port"] for each in rule.get("ports", ())]
        if ports and port not in ports:
            continue
        selectors = [peer.get("podSelector", {}).get("matchLabels", {}) for peer in rule.get(side, ())]
        if side not in rule or any(s.get("app.kubernetes.io/component") == component for s in selectors):
            return True
    return False


def test_pools_scale_by_metrics_that_routers_have() -> None:
    metrics = known()
    scaled = of_kind("gpu", "ScaledObject")
    assert {made["spec"]["scaleTargetRef"]["name"] for made in scaled} == {"baton-prefill", "baton-decode"}
    for made in scaled:
        target = next(
            each for each in of_kind("gpu", "StatefulSet") if each["metadata"]["name"] == made["metadata"]["name"]
        )
        assert "replicas" not in target["spec"]  # or an upgrade would undo the scaling
        for trigger in made["spec"]["triggers"]:
            assert trigger["metadata"]["ignoreNullValues"] == "false"  # KEDA's default takes what is not there for 0
            for metric, matchers in re.findall(r"(baton:\w+)\{([^}]*)\}", trigger["metadata"]["query"]):
                labels = set(re.findall(r"(\w+)=", matchers))
                assert labels <= metrics[metric] | {"namespace", "service"}, metric  # the operator adds those two


@pytest.mark.parametrize("name", ["tiny", "gpu"])
def test_values_name_no_replicas_of_what_scales_by_itself(name: str) -> None:
    """The chart leaves them to the scaling, which begins with its own least."""
    values = yaml.safe_load(VALUES[name].read_text())
    pools = {pool: values.get(pool, {}) for pool in ("router", "prefill", "decode")}
    scaled = [pool for pool, own in pools.items() if own.get("autoscaling", {}).get("enabled")]
    assert [pool for pool in scaled if "replicas" in pools[pool]] == []
    if name == "gpu":
        assert scaled == ["router", "prefill", "decode"]
        assert {made["spec"]["minReplicaCount"] for made in of_kind(name, "ScaledObject")} == {2}  # as the docs say


@needs_promtool
def test_prometheus_can_read_what_keda_asks(tmp_path: Path) -> None:
    triggers = [trigger for made in of_kind("gpu", "ScaledObject") for trigger in made["spec"]["triggers"]]
    assert all(isinstance(value, str) for trigger in triggers for value in trigger["metadata"].values())
    rules = [{"record": f"asked:{i}", "expr": trigger["metadata"]["query"]} for i, trigger in enumerate(triggers)]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "asked", "rules": rules}]}))
    ran = subprocess.run([str(PROMTOOL), "check", "rules", str(file)], capture_output=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stdout


def test_no_hook_sleeps_for_no_time() -> None:
    """Kubernetes refuses that before 1.33."""
    hook = "{{- if $router.preStopSeconds }}\n          lifecycle:\n            preStop: { sleep: "
    assert hook in (CHART / "templates" / "router.yaml").read_text()


@pytest.mark.skipif(HELM is None, reason="helm is not installed")
def test_the_chart_has_the_alerts_and_the_dashboard_of_this_version() -> None:
    made = list(yaml.safe_load_all(render_chart.template(str(HELM), CHART, VALUES["gpu"])))
    (rule,) = [each for each in made if each["kind"] == "PrometheusRule"]
    assert rule["spec"] == yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
    (dashboard,) = [each["data"]["baton.json"] for each in made if each["kind"] == "ConfigMap"]
    assert json.loads(dashboard) == json.loads((DEPLOY / "grafana" / "baton.json").read_text())


def test_the_charts_files_are_those_of_prometheus_and_grafana() -> None:
    linked = {path.name: path.resolve() for path in (CHART / "files").iterdir()}
    assert linked == {
        "alerts.yml": DEPLOY / "prometheus" / "alerts.yml",
        "dashboard.json": DEPLOY / "grafana" / "baton.json",
    }


def test_prometheus_scrapes_every_pod_as_the_job_that_the_alerts_name() -> None:
    (monitor,) = of_kind("gpu", "ServiceMonitor")
    services = of_kind("gpu", "Service")
    selector = monitor["spec"]["selector"]["matchLabels"].items()
    assert all(selector <= made["metadata"]["labels"].items() for made in services)
    scraped = {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]}
    assert all(scraped & {port["name"] for port in made["spec"]["ports"]} for made in services)
    for endpoint in monitor["spec"]["endpoints"]:
        assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": "baton"}]


def test_the_charts_version_of_baton_is_this_one() -> None:
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == baton.__version__
