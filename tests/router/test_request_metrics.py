"""What is counted of tokens, however many come at once."""

from __future__ import annotations

import math

import pytest
from prometheus_client import CollectorRegistry

from baton.errors import Overloaded
from baton.messages import Tokens
from baton.node_info import NodeRole
from baton.sampling import SamplingParams
from baton.telemetry import ROUTER, RouterMetrics, new_registry
from router.request_metrics import RequestMetrics
from router.requests.request_state import RequestEnd, RequestTimings, RoutedRequest
from router.settings import RouterSettings
from tools.metrics_page import node_registry, router_registry


@pytest.fixture
def registry() -> CollectorRegistry:
    return new_registry(ROUTER)


@pytest.fixture
def request_metrics(registry: CollectorRegistry) -> RequestMetrics:
    """With request `r`, received at 10.0."""
    request_metrics = RequestMetrics(RouterMetrics(registry), lambda: "m")
    request_metrics.opened(RoutedRequest("r", (1, 2, 3), 2, SamplingParams(), 60.0), 10.0)
    return request_metrics


def value(registry: CollectorRegistry, name: str) -> float:
    """Of one name, over all labels."""
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    return sum(sample.value for sample in samples if sample.name == f"baton:{name}")


def tokens(sample: int, count: int) -> Tokens:
    return Tokens(sample, 0, tuple(range(count)))


def test_tokens_that_come_together_share_the_time_since_the_last_one(
    request_metrics: RequestMetrics, registry: CollectorRegistry
) -> None:
    request_metrics.event("r", tokens(0, 1), 11.0)
    request_metrics.event("r", tokens(0, 4), 13.0)
    assert value(registry, "inter_token_latency_seconds_count") == 4
    assert value(registry, "inter_token_latency_seconds_sum") == pytest.approx(2.0)
    assert value(registry, "generation_tokens_total") == 5


def test_a_request_has_one_first_token_and_each_sample_its_own_pace(
    request_metrics: RequestMetrics, registry: CollectorRegistry
) -> None:
    request_metrics.event("r", tokens(0, 1), 11.5)
    request_metrics.event("r", tokens(1, 1), 12.0)
    request_metrics.event("r", tokens(1, 1), 12.5)
    assert value(registry, "time_to_first_token_seconds_count") == 1
    assert value(registry, "time_to_first_token_seconds_sum") == pytest.approx(1.5)
    assert value(registry, "inter_token_latency_seconds_sum") == pytest.approx(0.5)


def test_requests_that_are_refused_do_not_make_the_others_look_fast(
    request_metrics: RequestMetrics, registry: CollectorRegistry
) -> None:
    for _ in range(99):
        request_metrics.refused(Overloaded("full"))
    request_metrics.event("r", RequestEnd(None, RequestTimings(total_s=5.0)), 15.0)
    assert value(registry, "request_ends_total") == 100
    assert value(registry, "e2e_request_latency_seconds_count") == 1
    assert value(registry, "e2e_request_latency_seconds_sum") == 5.0


@pytest.mark.parametrize(("num_attempts", "expected_s", "counted"), [(1, 0.5, 1), (2, 0.5, 0), (1, 0.0, 0)])
def test_how_far_off_placement_was_is_told(
    request_metrics: RequestMetrics, registry: CollectorRegistry, num_attempts: int, expected_s: float, counted: int
) -> None:
    timings = RequestTimings(num_attempts=num_attempts, first_token_s=1.0, expected_first_token_s=expected_s)
    request_metrics.event("r", RequestEnd(None, timings), 12.0)
    assert value(registry, "time_to_first_token_actual_to_expected_count") == counted
    assert value(registry, "time_to_first_token_actual_to_expected_sum") == 2.0 * counted


def test_placements_are_counted_by_kind(registry: CollectorRegistry) -> None:
    metrics = RouterMetrics(registry)
    for total in (2, 5):
        metrics.set_placements("cost", {"pair": total, "waited": 1})
    assert value(registry, "placements_total") == 6


@pytest.mark.parametrize(
    ("registry", "histogram"),
    [
        (router_registry(), "e2e_request_latency_seconds"),
        (router_registry(), "time_to_first_token_seconds"),
        (router_registry(), "time_to_first_token_stage_seconds"),
        (node_registry(NodeRole.PREFILL), "request_queue_time_seconds"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_histogram_tells_how_long_the_longest_request_took(registry: CollectorRegistry, histogram: str) -> None:
    """A quantile above the last bound is shown as that bound."""
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    bounds = {float(s.labels["le"]) for s in samples if s.name == f"baton:{histogram}_bucket"} - {math.inf}
    assert max(bounds) >= RouterSettings.model_fields["request_timeout"].default
