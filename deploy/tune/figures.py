"""The figures of a run that the rules look at, from the pages of its processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from deploy.tune.pages import Window

POOLS = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Pool:
    """The nodes of a role. None: not known, as without the nodes' own pages.

    waiting: requests, on the nodes; for decode nodes also those that the router keeps until one has room.
    kv_blocks, seats: share in use. device: share of the time in which devices compute. gap: of the time in which a
    device computes or waits for its host, the part in which it waits; for devices of their own only. tokens_per_step:
    of prompts, in the steps that have any. prompt_steps: share of the steps that have prompts. preemptions: per attempt
    that ended. slots: share of the staging slots in use.
    """

    num_nodes: int = 0
    waiting: float = 0.0
    running: float = 0.0
    kv_blocks: float = 0.0
    seats: float = 0.0
    device: float | None = None
    gap: float | None = None
    tokens_per_step: float | None = None
    prompt_steps: float | None = None
    preemptions: float | None = None
    slots: float | None = None


@dataclass(frozen=True, slots=True)
class Figures:
    """seconds: of the run; None: not known, of saved pages. bottleneck: share of the time by pool. stages: mean seconds
    of the time to first token, by stage. hits: share of prompt tokens that were in a prefix cache."""

    seconds: float | None = None
    num_requests: int = 0
    prefill: Pool = field(default_factory=Pool)
    decode: Pool = field(default_factory=Pool)
    bottleneck: dict[str, float] = field(default_factory=dict)
    ttft_s: float | None = None
    ttft_p90_s: float | None = None
    stages: dict[str, float] = field(default_factory=dict)
    itl_p50_s: float | None = None
    itl_p99_s: float | None = None
    hits: float | None = None
    transfer_s: float | None = None

    def pool(self, name: str) -> Pool:
        return self.prefill if name == "prefill" else self.decode

    def stage_share(self, name: str) -> float:
        """Of the mean time to first token."""
        return self.stages.get(name, 0.0) / self.ttft_s if self.ttft_s else 0.0


def figures(windows: Sequence[Window]) -> Figures:
    """Raises ValueError unless there are pages of one router."""
    routers = [window for window in windows if window.role == "router"]
    if not routers:
        raise ValueError("there is no page of a router among them")
    if len(routers) > 1:
        raise ValueError("there are pages of several routers, or of one that began again: name those of one")
    (router,) = routers
    nodes = {role: [window for window in windows if window.role == role] for role in POOLS}
    ttft = "baton:time_to_first_token_seconds"
    num_first = router.increase(f"{ttft}_count")
    stages = router.by("stage", "baton:time_to_first_token_stage_seconds_sum")
    itl = "baton:inter_token_latency_seconds"
    num_prompt_tokens = router.increase("baton:prompt_tokens_total")
    return Figures(
        seconds=router.seconds,
        num_requests=round(router.increase("baton:request_ends_total")),
        prefill=_pool("prefill", router, nodes["prefill"]),
        decode=_pool("decode", router, nodes["decode"]),
        bottleneck={name: router.gauge("baton:bottleneck", pool=name) or 0.0 for name in (*POOLS, "none")},
        ttft_s=router.mean(ttft),
        ttft_p90_s=router.quantile(ttft, 0.9),
        stages={stage: total / num_first for stage, total in stages.items() if total and num_first},
        itl_p50_s=router.quantile(itl, 0.5),
        itl_p99_s=router.quantile(itl, 0.99),
        hits=router.increase("baton:prefix_hit_tokens_total") / num_prompt_tokens if num_prompt_tokens else None,
        transfer_s=_transfer_s(nodes["decode"]),
    )


def _pool(name: str, router: Window, nodes: Sequence[Window]) -> Pool:
    def said(metric: str, **labels: str) -> float:
        return router.gauge(f"baton:{metric}", pool=name, **labels) or 0.0

    kept = router.gauge_sum("baton:num_requests", state="unplaced") if name == "decode" else 0.0
    return Pool(
        num_nodes=round(router.gauge("baton:nodes", node_role=name, state="up") or 0),
        waiting=said("pool_requests", state="waiting") + kept,
        running=said("pool_requests", state="running"),
        kv_blocks=said("pool_utilization", resource="kv_blocks"),
        seats=said("pool_utilization", resource="seats"),
        device=_device_share(nodes),
        gap=_gap_share(nodes),
        tokens_per_step=_ratio(_sum(nodes, "baton:iteration_tokens_total", kind="prompt"), _prompt_steps(nodes)),
        prompt_steps=_ratio(_prompt_steps(nodes), _sum(nodes, "baton:engine_steps_total")),
        preemptions=_ratio(_sum(nodes, "baton:num_preemptions_total"), _sum(nodes, "baton:node_request_ends_total")),
        slots=_slots(nodes),
    )


def _sum(nodes: Sequence[Window], name: str, **labels: str) -> float:
    return sum(node.increase(name, **labels) for node in nodes)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _prompt_steps(nodes: Sequence[Window]) -> float:
    return sum(_sum(nodes, "baton:engine_steps_total", kind=kind) for kind in ("prompt", "mixed"))


def _phase(nodes: Sequence[Window], phase: str) -> float:
    return _sum(nodes, "baton:step_time_seconds_total", phase=phase)


def _device_share(nodes: Sequence[Window]) -> float | None:
    known = [node for node in nodes if node.seconds and node.has("baton:step_time_seconds_total")]
    total_s = sum(node.seconds or 0.0 for node in known)
    return min(1.0, _phase(known, "device") / total_s) if total_s else None


def _gap_share(nodes: Sequence[Window]) -> float | None:
    """Of nodes with a device of their own: on others the launch computes, so there are no seconds of launches."""
    known = [node for node in nodes if _phase([node], "launch")]
    gap_s = _phase(known, "gap")
    return _ratio(gap_s, gap_s + _phase(known, "device"))


def _slots(nodes: Sequence[Window]) -> float | None:
    in_use = sum(node.gauge("baton:kv_slots", state="in_use") or 0.0 for node in nodes)
    return _ratio(in_use, in_use + sum(node.gauge("baton:kv_slots", state="free") or 0.0 for node in nodes))


def _transfer_s(nodes: Sequence[Window]) -> float | None:
    return _ratio(_sum(nodes, "baton:kv_transfer_seconds_sum"), _sum(nodes, "baton:kv_transfer_seconds_count"))
