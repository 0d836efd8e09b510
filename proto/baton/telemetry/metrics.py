"""Prometheus metrics, with vLLM's names where it has the metric (`vllm:x` is `baton:x` here).

Each process has one registry, and every sample carries the process's `role`. Router and nodes share no names except
those of the process itself, so a plain sum() over a fleet counts nothing twice. The router counts requests, as clients
see them, under vLLM's names. A node counts its own work on them as `baton:node_*`, including failed attempts and tokens
that no client received. What only one side measures (queues, transfers, caches) exists only there.

A node's metrics are derived from the messages that it exchanges anyway (`Prefill`, `Started`, `Tokens`, `Adopted`,
`End`, `Load`), except its counts of blocks, slots, preemptions and damage: nothing is timed twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, ProcessCollector

import baton
from baton.errors import BatonError, RequestCancelled
from baton.messages import Adopted, AttemptId, End, HandedOff, Load, Prefill, Started, Tokens, Update
from baton.telemetry.experts import ExpertMetrics, ExpertReadings
from baton.telemetry.pools import PoolMetrics
from baton.telemetry.steps import StepMetrics
from baton.telemetry.tally import CounterByModel, HistogramByModel
from baton.telemetry.timeline_metrics import PHASE_S, TimelineMetrics
from baton.telemetry.token_metrics import FIRST_TOKEN_S, INTER_TOKEN_S, TokenMetrics
from baton.telemetry.vllm_names import vllm_metrics

_RATIO = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)
_REQUEST_S = (  # as in vLLM
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
    *(960.0, 1920.0, 7680.0),
)


ROUTER = "router"
"""The router's `role`; a node's is its `NodeRole`."""


class _RoleRegistry(CollectorRegistry):
    """Adds vLLM's names, and the label `role` to everything that it collects."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = {"role": role}

    def collect(self) -> Iterable[Metric]:
        own = list(super().collect())
        for metric in (*own, *vllm_metrics(own)):
            metric.samples = [sample._replace(labels=sample.labels | self._role) for sample in metric.samples]
            yield metric


def new_registry(role: str) -> CollectorRegistry:
    """A registry with the process's own metrics (CPU, memory, files) and its version."""
    registry = _RoleRegistry(role)
    ProcessCollector(registry=registry)
    info = Gauge("baton:build_info", "Version of the software.", ["version"], registry=registry)
    info.labels(baton.__version__).set(1)
    return registry


def outcome_labels(error: BatonError | None, finish_reason: str = "") -> tuple[str, str]:
    """(outcome, reason) of an end: finished with the finish reason, cancelled, or failed with the error's code."""
    if error is None:
        return "finished", finish_reason
    if isinstance(error, RequestCancelled):
        return "cancelled", ""
    return "failed", error.code_name


class RouterMetrics:
    """A router's metrics. `model` is the served name; it labels every metric of a request as `model_name`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, bounds: tuple[float, ...]) -> HistogramByModel:
            return HistogramByModel(f"baton:{name}", text, bounds, registry)

        def counter(name: str, text: str, *labels: str) -> CounterByModel:
            return CounterByModel(f"baton:{name}", text, registry, *labels)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"baton:{name}", text, labels, registry=registry)

        self.requests = gauge("num_requests", "Live requests by state.", "state")
        self.nodes = gauge("nodes", "Nodes by role: up, down or incompatible.", "node_role", "state")
        self._prefix_index = gauge("prefix_index_blocks", "KV blocks in a node's prefix cache, as published.", "node")
        self._placements = Counter(
            "baton:placements",
            "Decisions on which nodes get an attempt: pair, decode_alone, waited.",
            ["policy", "kind"],
            registry=registry,
        )
        self._num_placements: dict[str, int] = {}
        self._migrations = Counter(
            "baton:migrations",
            "Moves of running requests between decode nodes: moved, stayed, lost.",
            ["outcome"],
            registry=registry,
        )
        self._num_migrations: dict[str, int] = {}
        self.refused_connections = Counter(
            "baton:refused_connections", "HTTP connections beyond --max-connections.", registry=registry
        )
        self.first_token_ratio = histogram(
            "time_to_first_token_actual_to_expected",
            "Time to first token of requests with one attempt, divided by what placement expected.",
            _RATIO,
        )
        self.ends = counter("request_ends", "Requests ended, by outcome.", "outcome", "reason")
        self.attempts = counter("request_attempts", "Attempts beyond a request's first, by cause.", "reason")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that started.")
        self.generation_tokens = counter("generation_tokens", "Tokens delivered to clients.")
        self.first_token_s = histogram(
            "time_to_first_token_seconds", "Receipt of a request to its first token.", FIRST_TOKEN_S
        )
        self.inter_token_s = histogram(
            "inter_token_latency_seconds", "Between neighbouring tokens of a sample.", INTER_TOKEN_S
        )
        self.request_s = histogram("e2e_request_latency_seconds", "Receipt to end, unless refused.", _REQUEST_S)
        self.timelines = TimelineMetrics(registry)
        self.pools = PoolMetrics(registry)

    def set_requests(self, by_state: Mapping[str, int]) -> None:
        for state, count in by_state.items():
            self.requests.labels(state).set(count)

    def set_prefix_index(self, num_blocks: Mapping[str, int]) -> None:
        """By node; others are gone."""
        self._prefix_index.clear()
        for node, number in num_blocks.items():
            self._prefix_index.labels(node).set(number)

    def set_placements(self, policy: str, totals: Mapping[str, int]) -> None:
        """By kind, since the start."""
        for kind, total in totals.items():
            self._placements.labels(policy, kind).inc(total - self._num_placements.get(kind, 0))
            self._num_placements[kind] = total

    def set_migrations(self, totals: Mapping[str, int]) -> None:
        """By outcome, since the start."""
        for outcome, total in totals.items():
            self._migrations.labels(outcome).inc(total - self._num_migrations.get(outcome, 0))
            self._num_migrations[outcome] = total

    def ended(self, model: str, total_s: float, error: BatonError | None, finish_reason: str = "") -> None:
        self.ends.labels(model, *outcome_labels(error, finish_reason)).inc()
        self.request_s.labels(model).observe(total_s)

    def refused(self, model: str, error: BatonError) -> None:
        """A request that was not taken up. It has no latency: a router that refuses most would look fast."""
        self.ends.labels(model, *outcome_labels(error)).inc()


class NodeMetrics:
    """A node's metrics, from the messages that pass through its shell, labelled with the model. For one thread only."""

    def __init__(self, registry: CollectorRegistry, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        names, values = ["model_name"], (model,)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"baton:{name}", text, names, buckets=PHASE_S, registry=registry).labels(*values)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"baton:{name}", text, names, registry=registry).labels(*values)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"baton:{name}", text, names, registry=registry).labels(*values)

        self._values = values
        self._registry = registry
        self._tokens = TokenMetrics(registry, model, clock)
        self._running = gauge("num_requests_running", "Requests in the running batch.")
        self._waiting = gauge("num_requests_waiting", "Requests in the queue.")
        self._usage = gauge("kv_cache_usage_perc", "Share of KV blocks in use, 1 is all.")
        self._blocks = Gauge("baton:kv_blocks", "KV blocks by state.", [*names, "state"], registry=registry)
        self._slots = Gauge(
            "baton:kv_slots", "Staging slots for KV parts by state.", [*names, "state"], registry=registry
        )
        self._ends = Counter(
            "baton:node_request_ends", "Attempts ended here.", [*names, "outcome", "reason"], registry=registry
        )
        self._preemptions = counter("num_preemptions", "Sequences that lost their KV blocks to others, to begin anew.")
        self._damaged = counter("kv_transfer_damaged_blocks", "Pieces of KV blocks that came with a wrong checksum.")
        self._num_preemptions = self._num_damaged = 0
        self._steps = StepMetrics(registry, names, values)
        self._prompt_tokens = counter("node_prompt_tokens", "Prompt tokens received.")
        self._unstarted: dict[AttemptId, int] = {}  # how many tokens will be looked up in the prefix cache
        self._prefix_queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._prefix_hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._queue_s = histogram("request_queue_time_seconds", "Waiting for the first chunk.")
        self._prefill_s = histogram("request_prefill_time_seconds", "First chunk scheduled to first token.")
        self._transfer_s = histogram("kv_transfer_seconds", "Commit to last byte scattered: what was not hidden.")
        self._handoff_s = histogram(
            "request_handoff_time_seconds", "Prompt computed to the first step here, but for a message's way."
        )
        self._transfer_bytes = counter("kv_transfer_bytes", "KV bytes taken in.")
        self._not_sent = counter("kv_transfer_cached_tokens", "Prompt tokens whose KV was here and did not travel.")

    def received(self, prefill: Prefill) -> None:
        self._tokens.received(prefill.attempt_id)
        num_tokens = len(prefill.prompt_tokens)
        self._prompt_tokens.inc(num_tokens)
        if prefill.sampling.num_prompt_logprobs is None:  # else the cache is not read
            self._unstarted[prefill.attempt_id] = num_tokens + len(prefill.samples[0].output_tokens)

    def sent(self, update: Update) -> None:
        match update.kind:
            case Tokens(sample, _, token_ids):
                self._tokens.sent(update.attempt_id, sample, len(token_ids))
            case Started(num_cached_tokens, queue_s):
                self._prefix_queries.inc(self._unstarted.pop(update.attempt_id, 0))
                self._prefix_hits.inc(num_cached_tokens)
                self._queue_s.observe(queue_s)
            case HandedOff(prefill_s):
                if prefill_s:  # none where a request moves on from a decode node
                    self._prefill_s.observe(prefill_s)
                self._ends.labels(*self._values, "handed_off", "").inc()
                self._tokens.forget(update.attempt_id)
            case Adopted(transfer_s, num_cached_tokens, transfer_bytes) as adopted:
                self._not_sent.inc(num_cached_tokens)
                self._handoff_s.observe(adopted.handoff_s)
                self._transfer_s.observe(transfer_s)
                self._transfer_bytes.inc(transfer_bytes)
            case End(error, prompt):
                if prompt is not None:  # computed here, and not handed over
                    self._prefill_s.observe(prompt.prefill_s)
                self._ends.labels(*self._values, *outcome_labels(error)).inc()
                self._tokens.forget(update.attempt_id)
                self._unstarted.pop(update.attempt_id, None)

    def lost(self, epoch: int) -> None:
        """A router is gone and its requests with it: no End will follow for them."""
        for attempt_id in [attempt_id for attempt_id in self._unstarted if attempt_id.router_epoch == epoch]:
            del self._unstarted[attempt_id]
        self._tokens.lost(epoch)

    def set_load(self, load: Load) -> None:
        self._running.set(load.num_running)
        self._waiting.set(load.num_waiting)
        used = load.num_blocks_total - load.num_blocks_free
        self._usage.set(used / load.num_blocks_total if load.num_blocks_total else 0.0)

    def set_counts(self, blocks: Mapping[str, int], num_preemptions: int, num_damaged: int = 0) -> None:
        """blocks: counts by state. The others: totals since the start."""
        for state, count in blocks.items():
            self._blocks.labels(*self._values, state).set(count)
        self._preemptions.inc(num_preemptions - self._num_preemptions)
        self._damaged.inc(num_damaged - self._num_damaged)
        self._num_preemptions, self._num_damaged = num_preemptions, num_damaged

    def set_steps(self, seconds: Mapping[str, float], steps: Mapping[str, int], tokens: Mapping[str, int]) -> None:
        """Totals since the start: seconds by phase, steps by kind, tokens by kind."""
        self._steps.set(seconds, steps, tokens)

    def set_cache_config(self, block_size: int, num_blocks: int, dtype: str) -> None:
        """What the KV pool of the node is made of."""
        labels = {"block_size": str(block_size), "num_gpu_blocks": str(num_blocks), "cache_dtype": dtype}
        info = Gauge(
            "baton:cache_config_info", "The KV pool; always 1.", ["model_name", *labels], registry=self._registry
        )
        info.labels(*self._values, *labels.values()).set(1)

    def watch_slots(self, total: int, count_free: Callable[[], int]) -> None:
        """`count_free` is called at each scrape, on the thread that serves the page."""
        self._slots.labels(*self._values, "free").set_function(count_free)
        self._slots.labels(*self._values, "in_use").set_function(lambda: total - count_free())

    def watch_experts(self, readings: ExpertReadings) -> None:
        """Of a mixture of experts; called as in `watch_slots`."""
        ExpertMetrics(self._registry, *self._values, readings)
