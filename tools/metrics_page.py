"""`python -m tools.metrics_page`: write the tables of docs/metrics.md, from the metrics that the processes register."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry, Metric

from baton.messages import AttemptId, End, Load, Prefill, Sample, Started, Tokens, Update
from baton.node_info import NodeRole
from baton.node_times import PromptTimes
from baton.sampling import SamplingParams
from baton.telemetry import ROUTER, ExpertReadings, NodeMetrics, RouterMetrics, new_registry
from baton.telemetry.pools import PoolState
from baton.telemetry.timeline import AttemptTimeline, Estimate, Timeline
from tools.api_reference.tables import code, table

PATH = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
_BEGIN, _END = "<!-- {name}: made by python -m tools.metrics_page -->\n", "<!-- end of {name} -->\n"
_TITLES = ("metric", "type", "labels", "what it is")
_ADDED = frozenset({"role", "worker", "le"})
"""Labels that are on everything, or belong to the type."""


def router_registry() -> CollectorRegistry:
    """A router's, each of whose metrics has a sample."""
    registry = new_registry(ROUTER)
    metrics = RouterMetrics(registry)
    metrics.set_requests({"queued": 1})
    metrics.nodes.labels("prefill", "up").set(1)
    metrics.set_prefix_index({"p-0": 1})
    metrics.set_placements("cost", {"pair": 1})
    metrics.set_migrations({"moved": 1})
    metrics.first_token_ratio.labels("m").observe(1.0)
    metrics.ended("m", 1.0, None, "stop")
    metrics.attempts.labels("m", "node_lost").inc()
    metrics.prompt_tokens.labels("m").inc()
    metrics.generation_tokens.labels("m").count += 1
    metrics.first_token_s.labels("m").observe(1.0)
    metrics.inter_token_s.labels("m").observe(1.0)
    metrics.timelines.observe(_timeline())
    metrics.pools.set({"prefill": PoolState(), "decode": PoolState(capacities={16: 100})})
    return registry


def _timeline() -> Timeline:
    why = Estimate("cost", "pair", 0.0, 0.0, 0.0, 0, 0.0)
    lost = AttemptTimeline(0, (0,), "p-0", "d-0", why, 0.1, ended_at_s=0.2, error="lost", state="handing_off")
    done = AttemptTimeline(1, (0,), "p-0", "d-0", why, 0.2, 0.3, num_cached_tokens=16, prompt=PromptTimes(0.1, 0.2))
    return Timeline("r.0", "m", 0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 1, 1, 1, (lost, done), 1)


def node_registry(role: NodeRole) -> CollectorRegistry:
    """A node's, each of whose metrics has a sample."""
    registry, attempt_id = new_registry(role.value), AttemptId(1, "r", 0)
    metrics = NodeMetrics(registry, "m")
    metrics.set_cache_config(16, 100, "bfloat16")
    metrics.watch_slots(1, lambda: 1)
    metrics.watch_experts(ExpertReadings(lambda: [1], lambda: 1.0, lambda: 1, lambda: 1.0, lambda: 1.0))
    metrics.set_load(Load())
    metrics.set_counts({"free": 1}, 0)
    metrics.set_steps({"device": 1.0}, {"decode": 1}, {"decode": 1})
    metrics.received(Prefill(attempt_id, "i", (1, 2), (Sample(0),), SamplingParams(), 1.0))
    for kind in (Started(1, 0.1), Tokens(0, 0, (1,)), End()):
        metrics.sent(Update(attempt_id, kind))
    return registry


def rows(metrics: Iterable[Metric], prefix: str) -> list[tuple[str, ...]]:
    """Of those whose names begin so: as they are on the page of a process, without what a histogram adds."""
    found = {}
    for metric in metrics:
        if metric.name.startswith(prefix):
            labels = dict.fromkeys(label for s in metric.samples for label in s.labels if label not in _ADDED)
            name = f"{metric.name}_total" if metric.type == "counter" else metric.name
            found[name] = (code(name), metric.type, ", ".join(map(code, labels)), metric.documentation)
    return [found[name] for name in sorted(found)]


def tables() -> dict[str, str]:
    """By the name that stands in the page around each."""
    router, node = list(router_registry().collect()), list(node_registry(NodeRole.DECODE).collect())
    made = {}
    for name, metrics in (("router", router), ("nodes", node)):
        made[name] = table(_TITLES, rows(metrics, "baton:"))
        made[f"{name}, vllm"] = table(_TITLES, rows(metrics, "vllm:"))
    return made


def render(page: str) -> str:
    """The page with its tables made anew. Raises ValueError if one has no place."""
    for name, made in tables().items():
        begin, end = _BEGIN.format(name=name), _END.format(name=name)
        before, rest = page[: page.index(begin)], page[page.index(end) :]
        page = f"{before}{begin}\n{made}\n{rest}"
    return page


def main() -> None:
    PATH.write_text(render(PATH.read_text()))


if __name__ == "__main__":
    main()
