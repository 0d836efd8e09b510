"""When the next step is launched: never after a device that keeps its pace runs dry, at once in any doubt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.pace import NUM_COSTS, NUM_REMEMBERED, QUANTILE, SHARE, SLACK_S, LaunchKind, Pace
from engine.step import Chunk
from engine.step_size import StepSize
from tests.engine.counting import sequence

TEN = StepSize(10, 1000)
PLAIN = LaunchKind()
PROMPT = StepSize(11, 1000, 500, 250_000)


def paced(*took_s: float, cost_s: float = 0.0, size: StepSize = TEN) -> Pace:
    """After steps of those times, one behind the other, with one more of the same size in flight since 100.0."""
    pace, now = Pace(), 100.0 - sum(took_s)
    pace.launched(size, now - cost_s, now, idle=False)
    for seconds in took_s:
        pace.launched(size, now, now + cost_s, idle=False)
        now += seconds
        pace.retired(now)
    return pace


def waits(pace: Pace, prompts: bool = False, newcomers: bool = False) -> float:
    """Seconds from the begin of the step in flight."""
    assert pace.busy_since is not None
    due = pace.launch_at(LaunchKind(prompts, newcomers))
    return 0.0 if due is None else due - pace.busy_since


def test_a_step_is_launched_shortly_before_the_one_before_it_ends() -> None:
    assert abs(waits(paced(0.010, 0.010)) - (SHARE * 0.010 - SLACK_S)) < 1e-9


def test_what_a_launch_costs_is_kept_free() -> None:
    assert abs(waits(paced(0.010, cost_s=0.002)) - (SHARE * 0.010 - SLACK_S - 0.002)) < 1e-9


def launched_after(num_slow: int) -> float:
    """How long the next launch waits after NUM_COSTS of which so many took 5 ms, the others 1."""
    pace, now = paced(0.010, 0.010), 100.0
    for i in range(NUM_COSTS):
        pace.launched(TEN, now, now + (0.005 if i < num_slow else 0.001), idle=False)
        now += 0.010
        pace.retired(now)
    return waits(pace)


def test_a_few_slow_launches_do_not_make_the_others_early() -> None:
    few = NUM_COSTS - 1 - int(QUANTILE * NUM_COSTS)
    assert few > 0
    assert abs(launched_after(few) - (SHARE * 0.010 - SLACK_S - 0.001)) < 1e-9
    assert abs(launched_after(few + 1) - (SHARE * 0.010 - SLACK_S - 0.005)) < 1e-9


def test_slow_launches_are_forgotten() -> None:
    pace, now = paced(0.010, 0.010), 100.0
    for cost_s in [0.005] * 20 * NUM_COSTS + [0.001] * NUM_COSTS:
        pace.launched(TEN, now, now + cost_s, idle=False)
        now += 0.010
        pace.retired(now)
    assert abs(waits(pace) - (SHARE * 0.010 - SLACK_S - 0.001)) < 1e-9


@pytest.mark.parametrize(("known_s", "late_s"), [(0.0, 0.003), (0.002, 0.003), (0.004, 0.003)])
def test_after_a_launch_behind_a_device_that_ran_dry_the_next_one_is_earlier(known_s: float, late_s: float) -> None:
    pace = paced(0.010, 0.010, cost_s=known_s)
    due = 100.0 + waits(pace)
    pace.launched(TEN, due, due + late_s, idle=True)
    took_s = min(0.010, due + late_s - 100.0)
    pace.retired(due + late_s)
    assert abs(waits(pace) - (SHARE * took_s - SLACK_S - max(late_s, known_s) - SLACK_S)) < 1e-9


def test_a_launch_that_costs_as_much_as_a_step_is_not_put_off() -> None:
    assert paced(0.010, cost_s=0.0095).launch_at(PLAIN) is None


def test_nothing_is_put_off_without_a_step_in_flight_or_one_known() -> None:
    pace = Pace()
    assert pace.launch_at(PLAIN) is None
    pace.launched(TEN, 0.0, 0.0, idle=False)
    assert pace.launch_at(PLAIN) is None
    pace.retired(0.010)
    assert pace.launch_at(PLAIN) is None
    assert pace.busy_since is None


def test_of_a_step_behind_which_the_device_ran_dry_nobody_knows_the_end() -> None:
    pace, now = paced(0.010, 0.010), 100.0
    for _ in range(NUM_REMEMBERED + 1):
        now += 0.035
        pace.launched(TEN, now, now, idle=True)
        pace.retired(now + 0.001)
    assert waits(pace, prompts=True) <= 0.010  # by what launches with prompts cost: none has


def test_a_step_of_which_nothing_was_expected_teaches_nothing_if_its_end_was_missed() -> None:
    pace = Pace()
    pace.launched(TEN, 0.0, 0.0, idle=False)
    pace.launched(TEN, 0.5, 0.5, idle=True)
    pace.retired(0.5)
    assert pace.launch_at(PLAIN) is None


def with_prompt(*took_s: float, size: StepSize = PROMPT) -> Pace:
    """After two decodes of 10 ms and steps of those times with a prompt, with one of `size` in flight since 200.0."""
    pace, now = paced(0.010, 0.010), 200.0 - sum(took_s)
    pace.launched(PROMPT if took_s else size, now, now, idle=False)
    pace.retired(now)
    for i, seconds in enumerate(took_s, 1):
        pace.launched(PROMPT if i < len(took_s) else size, now, now, idle=False)
        now += seconds
        pace.retired(now)
    return pace


def test_a_step_with_a_prompt_takes_at_least_as_long_as_one_without() -> None:
    assert abs(waits(with_prompt()) - (SHARE * 0.010 - SLACK_S)) < 1e-9


def test_steps_with_prompts_are_judged_by_such_steps() -> None:
    assert abs(waits(with_prompt(0.030, 0.030)) - (SHARE * 0.030 - SLACK_S)) < 1e-9
    half = StepSize(11, 1000, 250, 125_000)
    assert abs(waits(with_prompt(0.030, 0.030, size=half)) - (SHARE * 0.015 - SLACK_S)) < 1e-9


def test_a_chunk_unlike_those_before_is_judged_by_a_prediction() -> None:
    late = StepSize(11, 1000, 100, 800_000)
    pace = Pace(lambda size: 0.011 if size == late else None)
    pace.launched(PROMPT, 200.0, 200.0, idle=False)
    pace.launched(late, 200.0, 200.0, idle=False)
    pace.retired(200.020)
    assert abs(waits(pace) - (SHARE * 0.011 - SLACK_S)) < 1e-9


def test_the_shortest_step_with_a_prompt_is_forgotten_too() -> None:
    took_s = [0.010] + [0.030] * NUM_REMEMBERED
    assert abs(waits(with_prompt(*took_s)) - (SHARE * 0.030 - SLACK_S)) < 1e-9


def test_no_prediction_is_asked_for_of_decodes() -> None:
    pace = Pace(lambda size: 1.0)
    for now in (0.0, 0.010):
        pace.launched(TEN, now, now, idle=False)
    pace.retired(0.010)
    assert abs(waits(pace) - (SHARE * 0.010 - SLACK_S)) < 1e-9


def test_a_prompt_teaches_nothing_of_decodes() -> None:
    pace = with_prompt(0.030, 0.030)
    pace.launched(TEN, 200.0, 200.0, idle=False)
    pace.retired(200.030)
    assert abs(waits(pace) - (SHARE * 0.010 - SLACK_S)) < 1e-9


def test_what_a_launch_costs_is_known_by_whether_it_has_prompts() -> None:
    pace = paced(0.010, 0.010)
    pace.launched(PROMPT, 100.0, 100.005, idle=False)
    assert abs(waits(pace) - (SHARE * 0.010 - SLACK_S)) < 1e-9
    assert abs(waits(pace, prompts=True) - (SHARE * 0.010 - SLACK_S - 0.005)) < 1e-9


def test_launches_with_newcomers_do_not_make_the_others_early() -> None:
    pace = paced(0.010, 0.010)
    plain = waits(pace)
    pace.launched(TEN, 100.0, 100.003, idle=False, newcomers_since=100.0)
    assert waits(pace) == plain
    assert abs(waits(pace, newcomers=True) - (plain - 0.003)) < 1e-9


def test_to_wait_for_other_nodes_is_no_cost_of_a_launch() -> None:
    pace = paced(0.010, 0.010, cost_s=0.001)
    plain = waits(pace)
    pace.launched(TEN, 100.005, 100.009, idle=False, waited_s=0.003)
    assert abs(waits(pace) - plain) < 1e-9
    pace = paced(0.010, 0.010, cost_s=0.001)
    pace.launched(TEN, 100.005, 100.014, idle=True, waited_s=0.008)
    pace.retired(100.014)
    assert abs(waits(pace) - plain) < 1e-9, "they were late, not this one"


def test_a_launch_with_newcomers_costs_at_least_what_one_without_does() -> None:
    pace = paced(0.010, 0.010, cost_s=0.002)
    assert waits(pace, newcomers=True) == waits(pace)


def launched_with_newcomers(came: float) -> float:
    """How long the next launch with newcomers waits if such a launch was due at 0.0061 s of its step, began at 0.007,
    and ended when the device had gone idle; they came at `came`."""
    pace = paced(0.010, 0.010)
    pace.launched(TEN, 100.0, 100.003, idle=False, newcomers_since=100.0)
    pace.retired(100.010)
    pace.launched(TEN, 100.017, 100.0201, idle=True, newcomers_since=100.010 + came)
    pace.retired(100.0201)
    return waits(pace, newcomers=True)


def test_newcomers_after_their_launch_was_due_teach_what_it_cost_alone() -> None:
    """Nobody launched too late."""
    due = SHARE * 0.010 - SLACK_S - 0.003
    assert 0.006 < due < 0.0065
    assert due - 0.0002 < launched_with_newcomers(0.0065) < due


def test_newcomers_in_time_for_their_launch_teach_that_it_was_too_late() -> None:
    assert launched_with_newcomers(0.001) <= launched_with_newcomers(0.0065) - 0.0005


def test_a_step_that_was_shorter_than_expected_is_learned_from_at_once() -> None:
    pace = with_prompt(0.030, 0.030)
    pace.launched(PROMPT, 200.008, 200.008, idle=True)
    pace.retired(200.008)
    assert abs(waits(pace) - (SHARE * 0.008 - SLACK_S)) < 1e-9


def test_a_wait_that_was_too_long_is_followed_by_shorter_ones() -> None:
    pace = paced(0.010, 0.010)
    before = waits(pace)
    pace.launched(TEN, 100.012, 100.013, idle=True)  # it had ended already, nobody knows when
    pace.retired(100.013)
    assert pace.busy_since == 100.013
    assert 0 <= waits(pace) < before - SLACK_S
    margin = before - waits(pace)
    for _ in range(200):
        began = pace.busy_since
        due = pace.launch_at(PLAIN) or began
        pace.launched(TEN, due, due, idle=False)
        pace.retired(began + 0.010)
    assert before - waits(pace) < margin / 10, "it is never forgotten"


@given(
    seqs=st.tuples(st.integers(1, 256), st.integers(1, 256)),
    contexts=st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)),
    prompts=st.tuples(st.integers(0, 8192), st.integers(0, 8192)),
    costs=st.tuples(*[st.floats(0, 1e-2)] * 3),
)
def test_a_step_is_never_taken_for_longer_than_it_is(
    seqs: tuple[int, int],
    contexts: tuple[int, int],
    prompts: tuple[int, int],
    costs: tuple[float, float, float],
) -> None:
    base, per_seq, per_token = costs
    known, size = (
        StepSize(n, n + context, prompt, prompt * prompt)
        for n, context, prompt in zip(seqs, contexts, prompts, strict=True)
    )
    took = {
        s: base
        + per_seq * s.num_seqs
        + per_token * (s.num_context_tokens + 10 * s.num_prompt_tokens + s.num_prompt_pairs / 100) / 1000
        for s in (known, size)
    }
    assert size.least_share(known) * took[known] <= took[size] * (1 + 1e-9)


steps = st.lists(
    st.tuples(
        st.integers(1, 64),  # sequences
        st.floats(0, 0.003),  # until the loop has its turn: what a launch costs
        st.booleans(),  # a prompt is in it
    ),
    min_size=1,
    max_size=60,
)


@given(steps=steps, base_s=st.floats(0.003, 0.05))
def test_a_device_whose_steps_are_known_never_waits(steps: list[tuple[int, float, bool]], base_s: float) -> None:
    """A loop that launches when it is told to, each launch within the cost known so far."""
    pace, now, worst = Pace(), 0.0, {False: 0.0, True: 0.0}
    device_free = 0.0  # when all that was launched is done
    ends: list[float] = []
    for num_seqs, cost_s, prompt in steps:
        if len(ends) == 2:
            now = max(now, ends.pop(0))
            pace.retired(now)
        due = pace.launch_at(LaunchKind(prompts=prompt))
        now = max(now, due or 0.0)
        cost_s = min(cost_s, worst[prompt]) if due is not None else cost_s
        worst[prompt] = max(worst[prompt] * 0.9, cost_s)
        launched = now + cost_s
        if due is not None:
            assert launched <= device_free + 1e-9, "the device ran dry"
        size = StepSize(num_seqs, 100 * num_seqs, 500 * prompt, 250_000 * prompt)
        pace.launched(size, now, launched, idle=bool(ends) and device_free < launched)
        if ends and device_free < launched:
            pace.retired(launched)
            ends.clear()
        device_free = max(device_free, launched) + base_s * (1 + num_seqs / 64) + (0.05 if prompt else 0.0)
        ends.append(device_free)
        now = launched


def test_a_step_with_a_long_context_tells_little_about_those_without_it() -> None:
    """Compared with it, they could be shorter by far: the two before them say more."""
    pace = Pace()
    for begin, size in enumerate((TEN, TEN, StepSize(11, 100 * TEN.num_context_tokens))):
        pace.launched(size, float(begin), float(begin), idle=False)
        pace.retired(begin + 0.010)
    pace.launched(TEN, 5.0, 5.0, idle=False)
    assert pace.launch_at(PLAIN) == pytest.approx(5.0 + SHARE * 0.010 - SLACK_S)


@given(st.lists(st.floats(0.001, 0.05), min_size=1, max_size=8))
def test_the_shortest_of_the_last_steps_is_expected(took_s: list[float]) -> None:
    expected = max(0.0, SHARE * min(took_s[-NUM_REMEMBERED:]) - SLACK_S)
    assert abs(waits(paced(*took_s)) - expected) < 1e-9


def test_a_size_tells_decodes_from_prompts() -> None:
    seqs = [sequence(5), sequence(7)]
    assert StepSize.of([Chunk.of(seqs[0], 4, 1), Chunk.of(seqs[1], 6, 1)]) == StepSize(2, 12)
    assert StepSize.of([Chunk(seqs[0], 4, 3, num_logits=3), Chunk.of(seqs[1], 6, 1)]) == StepSize(4, 14), "with drafts"
    mixed = StepSize.of([Chunk.of(seqs[0], 4, 1), Chunk.of(seqs[1], 2, 4)])
    assert mixed == StepSize(2, 5, 4, 24)
    assert mixed.has_prompts


def test_a_launch_that_is_on_time_leaves_the_device_busy() -> None:
    pace = paced(0.010, cost_s=0.002)
    due = pace.launch_at(PLAIN)
    assert due is not None
    assert pace.idle_s(due, PLAIN, idle=False) == 0


def test_a_launch_that_is_late_leaves_the_device_idle_from_the_end_of_the_step_before() -> None:
    pace, newcomers = paced(0.010, cost_s=0.002), LaunchKind(newcomers=True)
    assert pace.idle_s(100.009, PLAIN, idle=False) == pytest.approx(0.001)
    assert pace.idle_s(100.015, PLAIN, idle=True) == pytest.approx(0.007)
    assert pace.idle_s(100.009, newcomers, idle=False) == pytest.approx(0.001), "no cheaper than without them"


def test_a_step_that_takes_longer_than_expected_keeps_the_device_busy() -> None:
    assert paced(0.010, cost_s=0.002).idle_s(100.015, PLAIN, idle=False) == pytest.approx(0.002), "only the launch"


def test_how_long_the_device_idles_is_unknown_without_a_step_in_flight_or_one_known() -> None:
    pace = Pace()
    assert pace.idle_s(5.0, PLAIN, idle=True) == 0
    pace.launched(TEN, 0.0, 0.0, idle=False)
    assert pace.idle_s(5.0, PLAIN, idle=True) == 0
