"""Traces, and fleets of simulated nodes that replay them in virtual time."""

from __future__ import annotations

import dataclasses
import itertools
import json
from functools import partial
from pathlib import Path
from random import Random

import pytest

from benchmarks.simulation import check
from benchmarks.simulation.clock import VirtualClock
from benchmarks.simulation.fleet import Answer, Fleet
from benchmarks.simulation.policies import make_router
from benchmarks.simulation.replay import main
from benchmarks.simulation.report import Limits, markdown, report
from deploy.bench.trace import BLOCK_TOKENS, Entry, TraceTokens, read_trace, write_trace
from deploy.bench.workloads import WORKLOADS, Shape, multi_turn, shared_prefix, uncorrelated
from engine.simulated.profile import load_profile
from engine.step_size import StepSize
from router.requests.request_state import RequestTimings

SHAPE = Shape(num_requests=20, per_s=30.0, input_len=300, output_len=6, prefix_len=1024, num_prefixes=3)
LIMITS = Limits(ttft_s=1.0, gap_s=1.0)

# ---- traces ----


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_trace_follows_from_its_seed_and_survives_its_file(name: str, tmp_path: Path) -> None:
    entries = WORKLOADS[name](SHAPE)
    assert entries == WORKLOADS[name](SHAPE) != WORKLOADS[name](dataclasses.replace(SHAPE, seed=1))
    assert len(entries) == SHAPE.num_requests
    file = tmp_path / "trace.jsonl"
    write_trace(file, entries)
    again = read_trace(file)
    assert [dataclasses.replace(entry, timestamp=0) for entry in again] == [
        dataclasses.replace(entry, timestamp=0) for entry in entries
    ]
    assert [entry.timestamp for entry in again] == pytest.approx([entry.timestamp for entry in entries], abs=1e-3)


def test_requests_arrive_at_the_rate_that_is_asked_for() -> None:
    entries = uncorrelated(Shape(num_requests=4000, per_s=20.0))
    assert entries[-1].timestamp / 1e3 == pytest.approx(200, rel=0.05)


def test_prompts_share_as_much_as_the_workload_says() -> None:
    """Shared prefixes are popular in order; a turn begins with the one before it; the rest has nothing in common."""
    first = [entry.hash_ids[0] for entry in shared_prefix(dataclasses.replace(SHAPE, num_requests=300))]
    counts = sorted((first.count(hash_id) for hash_id in set(first)), reverse=True)
    assert len(counts) == SHAPE.num_prefixes
    assert counts[0] > 2 * counts[2]
    blocks = [hash_id for entry in uncorrelated(SHAPE) for hash_id in entry.hash_ids]
    assert len(set(blocks)) == len(blocks)
    turns = multi_turn(dataclasses.replace(SHAPE, input_len=800, think_s=0.1))
    held = {entry.hash_ids[: entry.input_length // BLOCK_TOKENS] for entry in turns}
    assert any(entry.hash_ids[:end] in held for entry in turns for end in range(1, len(entry.hash_ids)))


def test_tokens_of_a_block_are_those_of_its_id() -> None:
    tokens = TraceTokens(100)
    one, other = (tokens.prompt(Entry(0, 700, 1, (5, last))) for last in (6, 7))
    assert len(one) == 700
    assert one[:BLOCK_TOKENS] == other[:BLOCK_TOKENS]
    assert one[BLOCK_TOKENS:] != other[BLOCK_TOKENS:]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hash_ids": [1, 2]}, "line 2: hash_ids must be 1 for input_length 5, not 2"),
        ({"hash_ids": ["a"]}, "line 2: hash_ids must be a list of integers"),
        ({"input_length": 0}, "line 2: .*input_length and output_length 1 or more"),
        ({"output_length": "6"}, "line 2: input_length and output_length must be integers"),
        ({"output_length": None}, "line 2: input_length and output_length must be integers"),
    ],
)
def test_what_is_wrong_with_a_trace_is_named(tmp_path: Path, change: dict[str, object], text: str) -> None:
    good = {"timestamp": 0, "input_length": 5, "output_length": 3, "hash_ids": [1]}
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in (good, good | change)))
    with pytest.raises(ValueError, match=text):
        read_trace(file)


# ---- time ----


def test_what_is_due_at_one_moment_happens_in_the_order_in_which_it_was_scheduled() -> None:
    clock, seen = VirtualClock(), list[tuple[float, str]]()
    for when, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        clock.at(when, lambda name=name: seen.append((clock.now(), name)))  # type: ignore[misc]
    clock.run(until=lambda: len(seen) == 3)
    assert seen == [(1.0, "a"), (1.0, "b"), (2.0, "c")]
    with pytest.raises(RuntimeError, match=r"nothing is left to happen after 2.000 s"):
        clock.run(until=lambda: False)


# ---- fleets ----


def replay(policy: str, entries: list[Entry], num_prefill: int = 2, num_decode: int = 2) -> tuple[Fleet, list[Answer]]:
    fleet = Fleet(num_prefill, num_decode, "h200-8b", partial(make_router, policy))
    return fleet, fleet.replay(entries)


def test_one_request_takes_the_time_of_its_steps_and_messages() -> None:
    profile, length = load_profile("h200-8b"), 1500
    _, (answer,) = replay("least-loaded", [Entry(0, length, 3, (1, 2, 3))], 1, 1)
    latency_s = profile.link.latency_us * 1e-6
    prompt_s = profile.step_s(StepSize(1, 0, length, length * length))
    decode_s = [profile.step_s(StepSize(1, length + 1 + i)) for i in range(2)]
    assert answer.token_times[0] == pytest.approx(2 * latency_s + prompt_s, rel=1e-3)
    assert answer.token_times[2] - answer.token_times[1] == pytest.approx(decode_s[1], rel=1e-3)
    handoff_s = answer.token_times[1] - answer.token_times[0] - decode_s[0]
    assert 0 <= handoff_s < 3e-3


def test_every_request_ends_with_its_length_and_leaves_no_block_behind() -> None:
    fleet, answers = replay("least-loaded", shared_prefix(SHAPE))
    assert [len(answer.token_times) for answer in answers] == [answer.entry.output_length for answer in answers]
    assert not any(answer.refused for answer in answers)
    for node in fleet.nodes.values():
        node.core.check_integrity()
        blocks = node.engine.blocks
        assert blocks.num_free + blocks.num_cached == blocks.num_total


def test_a_replay_is_the_same_every_time() -> None:
    entries = shared_prefix(SHAPE)
    assert len({repr([answer.token_times for answer in replay("random", entries)[1]]) for _ in range(2)}) == 1


def test_flags_of_nodes_and_of_the_router_count() -> None:
    entries = [Entry(0, 2048, 4, (1, 2, 3, 4)), *(Entry(1 + i, 512, 400, (10 + i,)) for i in range(4))]
    fleet = Fleet(1, 1, "h200-8b", partial(make_router, "cost", 1, "decode"), ["--target-itl=8"])
    fleet.replay(entries * 3)
    alone = [a for a in fleet.answers if a.timings and a.timings.prefill_node == "decode-000"]
    assert alone, "no decode node computed a prompt"
    assert all(len(a.token_times) == a.entry.output_length for a in fleet.answers)
    with pytest.raises(SystemExit):
        Fleet(1, 1, "h200-8b", partial(make_router, "cost"), ["--target-itl=soon"])


def test_single_nodes_need_no_prefill_node() -> None:
    fleet = Fleet(0, 2, "h200-8b", partial(make_router, "cost", 0))
    answers = fleet.replay([Entry(0, 300, 3, (i,)) for i in range(4)])
    assert {answer.timings.prefill_node for answer in answers if answer.timings} == {"decode-000", "decode-001"}


def test_a_simulated_pair_has_the_arrivals_of_the_real_one() -> None:
    settings = check.CheckSettings(profile="h200-8b", num_requests=5, seed=3)
    answers = check.simulated(settings, 10.0)
    random = Random(3)
    at = list(itertools.accumulate(random.expovariate(10.0) for _ in range(5)))
    assert [answer.arrived for answer in answers] == pytest.approx(at)
    assert all(len(answer.token_times) == settings.output_len for answer in answers)


def test_a_prefix_that_a_node_has_is_not_computed_again() -> None:
    entries = [Entry(1e3 * i, 1024 + 300, 2, (1, 2, 100 + i)) for i in range(4)]
    _, answers = replay("round-robin", entries)
    assert [answer.timings.num_cached_tokens for answer in answers] == [0, 0, 1024, 1024]
    assert {answer.timings.prefill_node for answer in answers} == {"prefill-000", "prefill-001"}
    ttft = [answer.token_times[0] - answer.arrived for answer in answers]
    assert ttft[2] < 0.6 * ttft[0]


# ---- the report ----


def test_the_report_counts_what_clients_saw() -> None:
    def answer(arrived: float, times: list[float], cached: int, node: str, refused: str = "") -> Answer:
        timings = RequestTimings(num_cached_tokens=cached, prefill_node=node, decode_node="d")
        return Answer(Entry(0, 100, len(times) or 1, (1,)), arrived, times, timings, refused)

    answers = [
        answer(0.0, [0.1, 0.2, 0.3], 0, "a"),
        answer(1.0, [1.3, 1.4, 2.0], 50, "b"),
        answer(1.0, [], 0, "b", "refused"),
    ]
    told = report(answers, 2, 2, Limits(ttft_s=0.2, gap_s=0.15))
    assert (told.num_requests, told.num_refused) == (3, 1)
    assert told.ttft_p50 == pytest.approx(200)
    assert told.longest_gap_p50 == pytest.approx(350)
    assert told.hit_rate == 0.25
    assert told.good_share == pytest.approx(1 / 3)
    assert told.goodput == pytest.approx(0.5)
    assert told.prefill_balance == pytest.approx(100 / 75)
    assert told.decode_balance == 2.0
    assert markdown({"cost": told}).endswith(" |\n\ncost: 1 of 3 refused")


def test_the_command_prints_a_row_for_each_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.jsonl"
    shape = ["--prefill=2", "--decode=1", "--num-requests=5", "--input-len=64", "--output-len=4"]
    main([*shape, f"--write-trace={file}", "--policy=round-robin,cost"])
    out = capsys.readouterr().out
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [line["policy"] for line in lines] == ["round-robin", "cost"]
    assert "| cost | " in out
    main([*shape, f"--trace={file}", "--policy=round-robin"])
    again = json.loads(capsys.readouterr().out.splitlines()[0])
    for key, value in lines[0].items():
        assert again[key] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-3))


def test_of_several_seeds_the_command_prints_medians(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--prefill=1", "--decode=1", "--num-requests=5", "--input-len=64", "--output-len=4", "--policy=cost"]

    def p90(seeds: str) -> float:
        main([*shape, f"--seeds={seeds}"])
        return float(json.loads(capsys.readouterr().out.splitlines()[0])["ttft_p90"])

    single = sorted(p90(seed) for seed in "012")
    assert len(set(single)) == 3
    assert p90("0,1,2") == single[1]


def test_a_policy_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--policy=fastest"])
    assert "fastest: must be among" in capsys.readouterr().err
