"""docs/metrics.md has every metric of a process that serves, and no other."""

from __future__ import annotations

import re

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.node_info import NodeRole
from tests.router.conftest import Router, client, nodes, router  # noqa: F401  (fixtures)
from tests.router.fake_node import FakeCluster
from tools.metrics_page import PATH, node_registry, render, tables


def test_the_page_is_what_the_processes_register() -> None:
    assert PATH.read_text() == render(PATH.read_text()), "run: python -m tools.metrics_page"


def in_table(name: str) -> set[str]:
    found = re.findall(r"^\| `(\S+)` \|", tables()[name], re.MULTILINE)
    return {row.removesuffix("_total") for row in found}


async def test_a_router_that_serves_has_all_metrics_of_the_page(
    client: httpx.AsyncClient,  # noqa: F811
    nodes: FakeCluster,  # noqa: F811
    router: Router,  # noqa: F811
) -> None:
    for max_tokens in (1, 4):
        answer = await client.post("/v1/completions", json={"prompt": "hello", "max_tokens": max_tokens})
        assert answer.status_code == 200
    await router.idle()
    page = (await client.get("/metrics")).text
    told = {family.name for family in text_string_to_metric_families(page)}
    told = {name for name in told if not name.startswith("process_") and not name.endswith("_created")}
    assert told == in_table("router") | in_table("router, vllm")


@pytest.mark.parametrize("role", NodeRole)
def test_nodes_of_both_roles_have_the_same_metrics(role: NodeRole) -> None:
    told = {metric.name for metric in node_registry(role).collect() if not metric.name.startswith("process_")}
    assert told == in_table("nodes") | in_table("nodes, vllm")


@pytest.mark.parametrize("page", sorted(path.name for path in PATH.parent.glob("*.md")))
def test_pages_name_metrics_as_a_query_has_to(page: str) -> None:
    """A histogram by its name alone too, of which a query has the parts."""
    rows = (row for name in ("router", "router, vllm", "nodes", "nodes, vllm") for row in tables()[name].splitlines())
    known = {row.split("`")[1] for row in rows if row.startswith("| `")}
    parts = {f"{name}_{part}" for name in known for part in ("bucket", "sum", "count")}
    named = set(re.findall(r"\b(?:baton|vllm):[a-z][a-z0-9_]*[a-z0-9]\b(?!_\*)", (PATH.parent / page).read_text()))
    assert named - known - parts - {"baton:worker_up"} == set()
