"""Log lines carry names; messages become metrics; each is counted where it is measured."""

import io
import json
import logging

import pytest

from baton.errors import Overloaded, RequestCancelled
from baton.log_levels import LogLevels
from baton.messages import Adopted, AttemptId, End, HandedOff, Load, Prefill, Sample, Started, Tokens, Update
from baton.node_times import PromptTimes
from baton.sampling import SamplingParams
from baton.telemetry import (
    ROUTER,
    ExpertReadings,
    NodeMetrics,
    RouterMetrics,
    configure_logging,
    new_registry,
    request_scope,
)
from baton.telemetry.trace_context import TraceContext, trace_scope

WORK = AttemptId(1, "r", 0)


@pytest.fixture
def lines():
    """What the process logs, as text."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    stream = io.StringIO()
    configure_logging(LogLevels(), "n0", stream)
    yield stream
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)


def test_lines_name_node_and_request(lines):
    log = logging.getLogger("some.module")
    with request_scope("r-1"):
        log.info("placed node=%s", "p-0")
    log.warning("aborted", extra={"request_id": "r-2"})
    log.info("idle")
    log.debug("not this one")
    first, second, third = lines.getvalue().splitlines()
    assert first.endswith("Z level=info node_id=n0 request_id=r-1 logger=some.module placed node=p-0")
    assert "level=warning node_id=n0 request_id=r-2 logger=some.module aborted" in second
    assert "request_id=- " in third


def test_a_client_cannot_forge_lines(lines):
    with request_scope("a\nlevel=error b"):
        logging.getLogger("m").info("x\r\ny")
    assert len(lines.getvalue().splitlines()) == 1


def test_tracebacks_are_kept_and_cannot_forge_lines_either(lines):
    try:
        raise ValueError("odd\n2026-01-31T12:00:00.123Z level=info\r2026-01-31T12:00:00.123Z \x1b[2J")
    except ValueError:
        logging.getLogger("m").exception("failed")
    first, *traceback = lines.getvalue().splitlines()
    assert " level=error " in first
    assert all(line.startswith("  ") and line.isprintable() for line in traceback)
    assert any(line.endswith("ValueError: odd") for line in traceback)


def test_lines_as_json_are_objects_with_fields():
    root = logging.getLogger()
    handlers, level, stream = list(root.handlers), root.level, io.StringIO()
    configure_logging(LogLevels(), "n0", stream, "json")
    try:
        log = logging.getLogger("m")
        with request_scope("r-1"), trace_scope(TraceContext(0xAB, 1)):
            log.info("ended\n%s", "x", extra={"fields": lambda: {"total_s": 1.5}})
        log.warning("idle", extra={"request_id": "r-2", "fields": None})
        try:
            raise ValueError("odd")
        except ValueError:
            log.exception("failed")
    finally:
        logging.captureWarnings(False)
        root.handlers[:] = handlers
        root.setLevel(level)
    first, second, third = (json.loads(line) for line in stream.getvalue().splitlines() if line)
    assert (first["level"], first["node_id"], first["logger"], first["message"]) == ("info", "n0", "m", "ended\nx")
    assert (first["request_id"], first["total_s"], first["trace_id"]) == ("r-1", 1.5, "0" * 30 + "ab")
    assert (second["request_id"], "trace_id" in second) == ("r-2", False)
    assert third["request_id"] is None
    assert "ValueError: odd" in third["exception"]


def test_node_messages_become_metrics():
    registry = new_registry("decode")
    metrics = NodeMetrics(registry, "tiny")
    metrics.received(Prefill(WORK, "i", (1, 2, 3), (Sample(0),), SamplingParams(), 1.0))
    kinds = (
        Started(2, 0.01),
        Tokens(0, 0, (5, 6)),
        HandedOff(0.25),
        Adopted(0.1, 16, 4096, commit_s=0.25, step_wait_s=0.5),
        End(prompt=PromptTimes(started_s=0.25, computed_s=0.75)),
        End(RequestCancelled("gone")),
        End(Overloaded("full")),
    )
    for kind in kinds:
        metrics.sent(Update(WORK, kind))
    metrics.set_load(Load(num_waiting=1, num_running=2, num_blocks_free=6, num_blocks_total=8))
    for num_preemptions in (2, 2, 5):
        metrics.set_counts({"free": 5, "cached": 1}, num_preemptions, num_damaged=num_preemptions - 2)
    metrics.watch_slots(8, lambda: 6)
    metrics.watch_experts(ExpertReadings(lambda: [7, 0, 9], lambda: 1.5, lambda: 1, lambda: 1.25, lambda: 0.5))
    labels = {"model_name": "tiny", "role": "decode"}

    def value(name: str, **more: str) -> float | None:
        return registry.get_sample_value(f"baton:{name}", labels | more)

    assert value("node_prompt_tokens_total") == value("prefix_cache_queries_total") == 3
    assert value("node_generation_tokens_total") == 2
    assert value("prefix_cache_hits_total") == 2
    assert (value("request_prefill_time_seconds_count"), value("request_prefill_time_seconds_sum")) == (2, 0.75)
    assert value("kv_transfer_cached_tokens_total") == 16
    assert value("kv_transfer_bytes_total") == 4096
    assert value("kv_transfer_seconds_sum") == 0.1
    assert value("request_handoff_time_seconds_sum") == pytest.approx(0.85)
    assert value("num_requests_running") == 2
    assert value("num_requests_waiting") == 1
    assert value("kv_cache_usage_perc") == 0.25
    assert value("kv_blocks", state="cached") == 1
    assert value("num_preemptions_total") == 5
    assert (value("expert_imbalance"), value("expert_rank_imbalance")) == (1.5, 1.25)
    assert [value("expert_tokens_total", expert=str(expert)) for expert in range(3)] == [7, 0, 9]
    assert value("expert_exchange_seconds_total") == 0.5
    assert value("expert_rebalances_total") == 1
    assert value("kv_transfer_damaged_blocks_total") == 3
    assert (value("kv_slots", state="free"), value("kv_slots", state="in_use")) == (6, 2)
    for outcome, reason in (("finished", ""), ("cancelled", ""), ("failed", "overloaded"), ("handed_off", "")):
        assert value("node_request_ends_total", outcome=outcome, reason=reason) == 1


def test_prefix_cache_queries_are_the_tokens_that_were_looked_up():
    registry = new_registry("prefill")
    metrics = NodeMetrics(registry, "tiny")
    waits, refused, asks, goes_on = (AttemptId(1, name, 1) for name in ("waits", "refused", "asks", "goes on"))
    scored = SamplingParams(num_prompt_logprobs=0)
    for attempt_id, sampling, output in (
        (waits, SamplingParams(), ()),
        (refused, SamplingParams(), ()),
        (asks, scored, ()),
        (goes_on, SamplingParams(), (7, 8, 9, 10)),
    ):
        metrics.received(Prefill(attempt_id, "i", (1, 2, 3), (Sample(0, output),), sampling, 1.0))
    metrics.sent(Update(refused, End(Overloaded("full"))))
    metrics.sent(Update(asks, Started(0, 0.01)))
    metrics.sent(Update(goes_on, Started(6, 0.01)))
    metrics.lost(2)
    labels = {"model_name": "tiny", "role": "prefill"}
    values = [registry.get_sample_value(f"baton:prefix_cache_{name}_total", labels) for name in ("queries", "hits")]
    assert values == [7, 6]
    assert [*metrics._unstarted] == [waits]
    metrics.lost(1)
    assert not metrics._unstarted


def test_token_times_are_taken_on_the_node():
    registry, now = new_registry("decode"), [10.0]
    metrics = NodeMetrics(registry, "tiny", clock=lambda: now[0])
    metrics.received(Prefill(WORK, "i", (1,), (Sample(0),), SamplingParams(), 1.0))
    for moment, sample in ((10.5, 0), (10.5, 1), (10.75, 0), (11.0, 1)):
        now[0] = moment
        metrics.sent(Update(WORK, Tokens(sample, 0, (5,))))
    labels = {"model_name": "tiny", "role": "decode"}
    sums = [
        registry.get_sample_value(f"baton:{name}", labels)
        for name in (
            "node_time_to_first_token_seconds_sum",
            "node_time_to_first_token_seconds_count",
            "node_inter_token_latency_seconds_sum",
            "node_inter_token_latency_seconds_count",
        )
    ]
    assert sums == [0.5, 1, 0.75, 2]
    metrics.received(Prefill(AttemptId(1, "other", 0), "i", (1,), (Sample(0),), SamplingParams(), 1.0))
    metrics.sent(Update(AttemptId(2, "r", 0), Tokens(0, 0, (5,))))
    metrics.lost(1)
    metrics.sent(Update(AttemptId(2, "r", 0), End()))
    assert not metrics._tokens._received
    assert not metrics._tokens._last


def test_tokens_of_a_node_that_come_together_share_the_time_since_the_last_one():
    registry, now = new_registry("decode"), [10.0]
    metrics = NodeMetrics(registry, "tiny", clock=lambda: now[0])
    for moment, num_tokens in ((10.0, 1), (12.0, 4)):
        now[0] = moment
        metrics.sent(Update(WORK, Tokens(0, 0, (5,) * num_tokens)))
    labels, name = {"model_name": "tiny", "role": "decode"}, "baton:node_inter_token_latency_seconds"
    assert registry.get_sample_value(f"{name}_count", labels) == 4
    assert registry.get_sample_value(f"{name}_sum", labels) == 2.0
    assert registry.get_sample_value(f"{name}_bucket", labels | {"le": "0.5"}) == 4


def test_router_metrics():
    registry = new_registry(ROUTER)
    metrics = RouterMetrics(registry)
    metrics.set_requests({"queued": 1, "decoding": 0})
    metrics.ended("tiny", 0.5, None, "stop")
    labels = {"model_name": "tiny", "role": "router"}
    assert registry.get_sample_value("baton:num_requests", {"state": "queued", "role": "router"}) == 1
    ends = labels | {"outcome": "finished", "reason": "stop"}
    assert registry.get_sample_value("baton:request_ends_total", ends) == 1
