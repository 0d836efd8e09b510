"""The rules of `baton tune`: each can fire and not fire."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from deploy.tune import rules
from deploy.tune.figures import Figures, Pool
from deploy.tune.rules import Goals, propose

QUIET = {"prefill": 0.0, "decode": 0.0, "none": 1.0}
GOOD = Figures(
    seconds=30.0,
    num_requests=1000,
    prefill=Pool(2, 0.2, 1.0, 0.4, 0.3, 0.55, 0.02, 4096.0, 1.0, 0.0, 0.2),
    decode=Pool(2, 0.0, 80.0, 0.5, 0.5, 0.7, 0.02, 300.0, 0.001, 0.0, 0.2),
    bottleneck=QUIET,
    ttft_s=0.2,
    ttft_p90_s=0.25,
    stages={"prefill": 0.15, "queue": 0.02, "transfer": 0.01, "network": 0.02},
    itl_p50_s=0.01,
    itl_p99_s=0.025,
    hits=0.3,
)


def limited(name: str) -> dict[str, float]:
    return QUIET | {"none": 0.1, name: 0.9}


def changed(*, prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None, **fields: Any) -> Figures:
    pools: dict[str, Any] = {
        "prefill": dataclasses.replace(GOOD.prefill, **prefill or {}),
        "decode": dataclasses.replace(GOOD.decode, **decode or {}),
    }
    return dataclasses.replace(GOOD, **pools, **fields)


def test_nothing_to_change():
    assert propose(GOOD, Goals()) == []
    assert propose(GOOD, Goals(ttft_s=0.3, itl_s=0.03)) == []


BUSY_PREFILL: dict[str, Any] = {"num_nodes": 2, "device": 1.0, "waiting": 6.0, "running": 2.0}
IDLE_DECODE: dict[str, Any] = {"num_nodes": 4, "device": 0.3, "kv_blocks": 0.2, "seats": 0.2}
STALLS: dict[str, Any] = {"prompt_steps": 0.1, "tokens_per_step": 1900.0}

FIRES: list[tuple[rules.Rule, Figures, Goals, str, str]] = [
    (
        rules.ratio,
        changed(prefill=BUSY_PREFILL, decode=IDLE_DECODE, bottleneck=limited("prefill")),
        Goals(),
        "P:D ratio",
        "4:2 instead of 2:4",
    ),
    (
        rules.grow,
        changed(prefill=BUSY_PREFILL, decode={"seats": 0.95}, bottleneck=limited("prefill")),
        Goals(),
        "prefill nodes",
        "3 instead of 2",
    ),
    (
        rules.grow,
        changed(decode={"kv_blocks": 0.97, "waiting": 4.0, "device": None}, bottleneck=limited("decode")),
        Goals(),
        "decode nodes",
        "3 instead of 2",
    ),
    (
        rules.first_token,
        changed(stages={"queue": 0.1, "prefill": 0.1}, ttft_p90_s=0.9),
        Goals(ttft_s=0.5),
        "prefill nodes",
        "3 instead of 2",
    ),
    (
        rules.shrink,
        changed(prefill={"device": 0.1, "kv_blocks": 0.1, "seats": 0.1, "waiting": 0.0}),
        Goals(),
        "prefill nodes",
        "1 instead of 2",
    ),
    (
        rules.prefill_step,
        changed(prefill={"tokens_per_step": 600.0, "waiting": 5.0}, stages={"queue": 0.12, "prefill": 0.08}),
        Goals(),
        "--max-num-batched-tokens",
        "2048 on prefill nodes",
    ),
    (
        rules.decode_step,
        changed(decode=STALLS, itl_p99_s=0.1),
        Goals(),
        "--max-num-batched-tokens",
        "512 on decode nodes",
    ),
    (rules.target_itl, changed(decode=STALLS, itl_p99_s=0.1), Goals(), "--target-itl", "25 on decode nodes"),
    (
        rules.target_itl,
        changed(decode=STALLS, itl_p99_s=0.035),
        Goals(itl_s=0.03),
        "--target-itl",
        "30 on decode nodes",
    ),
    (
        rules.preemptions,
        changed(decode={"preemptions": 0.05}),
        Goals(),
        "--max-num-seqs, --gpu-memory-utilization",
        "lower the first, or raise the second",
    ),
    (
        rules.pool_size,
        changed(decode={"kv_blocks": 0.96, "seats": 0.3, "waiting": 3.0}),
        Goals(),
        "--gpu-memory-utilization",
        "raise it on decode nodes, to 0.95 at most",
    ),
    (
        rules.seats,
        changed(decode={"kv_blocks": 0.3, "seats": 1.0, "waiting": 3.0}),
        Goals(),
        "--max-num-seqs",
        "double it on decode nodes",
    ),
    (
        rules.transfer,
        changed(stages={"transfer": 0.1, "prefill": 0.1}),
        Goals(),
        "the link",
        "run baton doctor --peer between a prefill and a decode node",
    ),
    (
        rules.transfer,
        changed(stages={"reserve": 0.1, "prefill": 0.1}, decode={"slots": 0.97}),
        Goals(),
        "--kv-slots",
        "double it on both roles",
    ),
    (
        rules.host,
        changed(decode={"gap": 0.3}),
        Goals(),
        "CPU",
        "more or faster cores for each node, nothing else on them; see POST /debug/profile",
    ),
]


@pytest.mark.parametrize(("rule", "found", "goals", "setting", "change"), FIRES)
def test_a_rule_fires(rule, found, goals, setting, change):
    proposal = rule(found, goals)
    assert proposal is not None
    assert (proposal.setting, proposal.change) == (setting, change)
    assert any(character.isdigit() for character in proposal.why), "the figures used"
    assert proposal in propose(found, goals)


QUIET_CASES: list[tuple[rules.Rule, Figures, Goals]] = [
    (rules.ratio, changed(prefill=BUSY_PREFILL, decode=IDLE_DECODE), Goals()),  # nothing limits
    (rules.ratio, changed(prefill=BUSY_PREFILL, decode={"seats": 0.95}, bottleneck=limited("prefill")), Goals()),
    (rules.ratio, changed(prefill={"device": None}, bottleneck=limited("prefill")), Goals()),  # without nodes' pages
    (rules.grow, changed(bottleneck=QUIET | {"none": 0.7, "prefill": 0.3}), Goals()),  # a burst
    (rules.grow, changed(prefill=BUSY_PREFILL, decode=IDLE_DECODE, bottleneck=limited("prefill")), Goals()),
    (rules.first_token, changed(stages={"queue": 0.1}, ttft_p90_s=0.4), Goals(ttft_s=0.5)),
    (rules.first_token, changed(stages={"prefill": 0.19}, ttft_p90_s=0.9), Goals(ttft_s=0.5)),  # not by waiting
    (rules.shrink, changed(prefill={"num_nodes": 1, "device": 0.1, "kv_blocks": 0.1, "seats": 0.1}), Goals()),
    (rules.shrink, changed(prefill={"device": 0.1, "kv_blocks": 0.9, "seats": 0.1}), Goals()),
    (rules.shrink, changed(prefill={"device": 0.1, "kv_blocks": 0.1, "seats": 0.1}, num_requests=0), Goals()),
    (rules.prefill_step, changed(prefill={"tokens_per_step": 8000.0, "waiting": 5.0}, stages={"queue": 0.1}), Goals()),
    (rules.prefill_step, changed(prefill={"tokens_per_step": 600.0, "waiting": 0.0}, stages={"queue": 0.1}), Goals()),
    (rules.prefill_step, changed(prefill={"tokens_per_step": 600.0, "waiting": 5.0}, stages={"queue": 0.01}), Goals()),
    (rules.decode_step, changed(decode={"prompt_steps": 0.0}, itl_p99_s=0.1), Goals()),  # not because of prompts
    (rules.decode_step, changed(decode=STALLS | {"tokens_per_step": 200.0}, itl_p99_s=0.1), Goals()),
    (rules.target_itl, changed(decode=STALLS, itl_p99_s=0.035), Goals()),
    (rules.target_itl, changed(decode=STALLS, itl_p99_s=0.1), Goals(itl_s=0.2)),
    (rules.preemptions, changed(decode={"preemptions": 0.005}), Goals()),
    (rules.pool_size, changed(decode={"kv_blocks": 0.96, "seats": 0.8, "waiting": 3.0}), Goals()),
    (rules.pool_size, changed(decode={"kv_blocks": 0.96, "seats": 0.3}), Goals()),
    (rules.seats, changed(decode={"kv_blocks": 0.8, "seats": 1.0, "waiting": 3.0}), Goals()),
    (rules.seats, changed(decode={"kv_blocks": 0.3, "seats": 1.0, "waiting": 3.0}), Goals(itl_s=0.015)),
    (rules.transfer, changed(stages={"reserve": 0.1, "prefill": 0.1}), Goals()),
    (rules.host, changed(decode={"gap": 0.1}), Goals()),
    (rules.host, changed(decode={"gap": None}, prefill={"gap": None}), Goals()),
]


@pytest.mark.parametrize(("rule", "found", "goals"), QUIET_CASES)
def test_a_rule_does_not_fire(rule, found, goals):
    assert rule(found, goals) is None


def test_every_rule_has_a_case_of_either_kind():
    assert {case[0] for case in FIRES} == {case[0] for case in QUIET_CASES} == set(rules.RULES)


def test_the_best_split_makes_the_busier_pool_least_busy():
    assert rules.best_split(1.0, 3.0, 4) == 1
    assert rules.best_split(3.0, 3.0, 6) == 3
    assert rules.best_split(0.1, 5.0, 2) == 1


def test_what_waits_is_work_too():
    pool = {"num_nodes": 2, "device": 1.0, "running": 4.0}
    loads = [
        rules.load_of(changed(prefill=pool | {"waiting": waiting}), "prefill", Goals()) for waiting in (0.0, 2.0, 100.0)
    ]
    assert loads == [2.0, 3.0, 4.0]
    assert rules.load_of(changed(prefill={"device": None}), "prefill", Goals()) is None


def test_a_decode_node_is_busy_when_it_has_no_room_or_is_as_slow_as_promised():
    found = changed(decode={"device": 1.0, "kv_blocks": 0.1, "seats": 0.2})
    assert rules.busy(found, "decode", Goals()) == 0.2
    assert rules.busy(found, "decode", Goals(itl_s=0.02)) == 0.5


def test_an_attempt_may_be_preempted_more_than_once():
    proposal = rules.preemptions(changed(decode={"preemptions": 1.167}), Goals())
    assert proposal is not None
    assert "lost their KV blocks to others 117 times" in proposal.why
