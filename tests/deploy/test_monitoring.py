"""Alerts, dashboard and runbook name what there is, and alerts fire when they should."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.errors import TransferError
from baton.node_info import NodeRole
from baton.telemetry import ROUTER, NodeMetrics, new_registry
from baton.telemetry.metrics import outcome_labels
from baton.telemetry.pools import PoolMetrics
from baton.telemetry.timeline import STAGES
from router.placement.routed_node import Node, pool_state
from tests.protocol.decoding import Decoding
from tests.router.rig import info
from tools.metrics_page import node_registry, router_registry

ROOT = Path(__file__).resolve().parents[2]
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "baton.json"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def queries() -> Iterator[tuple[str, str]]:
    """Where it stands, and the query."""
    for rule in rules():
        yield rule["alert"], rule["expr"]
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def known() -> dict[str, set[str]]:
    """Labels by the name of each sample that a router or a node shows."""
    found: dict[str, set[str]] = {"up": {"job"}}
    for registry in (router_registry(), *map(node_registry, NodeRole)):
        for metric in registry.collect():
            for sample in metric.samples:
                found.setdefault(sample.name, set()).update(sample.labels, {"instance", "job"})
    return found


@needs_promtool
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", "deploy/prometheus/prometheus.yml"),
        ("test", "rules", "tests/deploy/alerts_test.yml"),
    ],
)
def test_promtool_accepts_the_files_and_alerts_fire_as_they_should(arguments: tuple[str, ...]) -> None:
    assert PROMTOOL is not None
    ran = subprocess.run([PROMTOOL, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize(("where", "query"), list(queries()))
def test_queries_name_metrics_and_labels_that_there_are(where: str, query: str) -> None:
    metrics = known()
    selected = re.findall(r"((?:baton|vllm):\w+|\bup\b)(?:\{([^}]*)\})?", query)
    assert selected, f"{where}: no metric in {query}"
    for name, matchers in selected:
        assert name in metrics, f"{where}: {name} is not exported"
        labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
        assert labels <= metrics[name], f"{where}: {name} has no {labels - metrics[name]}"


def test_handoffs_fail_with_every_error_of_a_transfer() -> None:
    """And metrics.md says which they are."""
    (query,) = [rule["expr"] for rule in rules() if rule["alert"] == "BatonHandoffsFail"]
    (matched,) = re.findall(r'reason=~"([^"]*)"', query)
    errors: list[type[TransferError]] = [TransferError, *TransferError.__subclasses__()]
    reasons = {outcome_labels(error("no route"))[1] for error in errors}
    assert set(matched.split("|")) == reasons
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert [reason for reason in reasons if f"`{reason}`" not in page] == []


def test_a_decode_node_with_too_few_blocks_causes_what_the_alerts_about_its_pool_read() -> None:
    expressions = {rule["alert"]: rule["expr"] for rule in rules()}
    exhausted = re.fullmatch(r'max by \(pool\) \((.+){resource="(.+)"}\) > (.+)', expressions["BatonPoolExhausted"])
    preempting = re.fullmatch(r"sum by \(instance\) \(rate\((.+)\[5m\]\)\) > .+", expressions["BatonPreemptions"])
    assert exhausted
    assert preempting
    decoding, registry = Decoding(num_blocks=18), new_registry(ROUTER)
    pools, metrics, core = PoolMetrics(registry), NodeMetrics(registry, "m"), decoding.core
    node = Node(info("d", NodeRole.DECODE), core.load())

    def shown(name: str, **labels: str) -> float:
        value = registry.get_sample_value(name, {"role": ROUTER, **labels})
        assert value is not None
        return value

    def alerts() -> tuple[bool, float]:
        """Whether the pool counts as exhausted, and how many requests were preempted."""
        node.load = core.load()
        pools.set({"prefill": pool_state([], 0), "decode": pool_state([node], 0)})
        metrics.set_counts({}, core.engine.num_preemptions)
        used = shown(exhausted[1], pool="decode", resource=exhausted[2])
        return used > float(exhausted[3]), shown(preempting[1], model_name="m")

    for name in ("old", "young"):
        decoding.prefill(name, tuple(range(2, 26)), max_tokens=30)
    seen = [alerts()]
    while not core.engine.num_preemptions:
        decoding.turn()
        if decoding.node.model.is_busy:
            decoding.node.advance_device()
        seen.append(alerts())
    assert seen[0] == (False, 0.0)
    assert (True, 0.0) in seen
    assert seen[-1][1] == 1.0


def test_no_summary_tells_small_numbers_in_thousandths() -> None:
    """As Prometheus' `humanize` does: it writes "200m requests a second" for one in five."""
    summaries = [rule["annotations"]["summary"] for rule in rules()]
    assert [text for text in summaries if re.search(r"humanize\b", text)] == []


@pytest.mark.parametrize(("where", "query"), list(queries()))
def test_what_each_router_knows_of_all_nodes_is_not_added_up(where: str, query: str) -> None:
    assert not re.search(r"\bsum\b[^()]*(?:\([^()]*\)\s*)?\(baton:(?:nodes|pool_\w+|bottleneck)\b", query), where


def test_an_alert_about_all_nodes_fires_once_however_many_routers_and_workers_see_it() -> None:
    of_all = re.compile(r"baton:(?:nodes|pool_\w+|bottleneck)\b")
    once = re.compile(r"^(?:max by \([\w, ]+\) ?|absent)\(")
    alerts = [rule for rule in rules() if of_all.search(rule["expr"])]
    assert len(alerts) >= 5
    assert [rule["alert"] for rule in alerts if not once.match(rule["expr"])] == []


def test_a_panel_of_one_number_divides_by_none_that_is_zero_without_traffic() -> None:
    shown = [target["expr"] for panel in panels() if panel["type"] == "stat" for target in panel["targets"]]
    ratios = [query for query in shown if " / " in query]
    assert ratios
    assert [query for query in ratios if not re.search(r" / \(.* > 0\)", query)] == []


def test_the_runbook_has_a_section_for_each_alert() -> None:
    sections = re.findall(r"^## (\w+)$", (ROOT / "docs" / "runbook.md").read_text(), re.MULTILINE)
    assert sections == [rule["alert"] for rule in rules()]


def test_the_runbook_says_what_to_do_about_each_stage_of_a_slow_first_token() -> None:
    section = re.split(r"^## ", (ROOT / "docs" / "runbook.md").read_text(), flags=re.MULTILINE)
    (text,) = [part for part in section if part.startswith("BatonFirstTokenSlow\n")]
    heads = [line.partition(":")[0] for line in text.splitlines() if line.startswith("- ")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(heads))) == sorted(STAGES)


def test_every_panel_says_what_it_shows_and_has_a_place_of_its_own() -> None:
    shown = panels()
    assert all(panel["title"] and panel["description"] for panel in shown)
    assert len({panel["id"] for panel in shown}) == len(shown)
    cells = [
        (x, y)
        for panel in shown
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells), "panels overlap"
    assert max(x for x, _ in cells) < 24
