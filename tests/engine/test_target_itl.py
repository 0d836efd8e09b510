"""With a target for the time between tokens, prompts beside streams get chunks for which the step is predicted to keep
it; they always get some, and every token is the same."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.engine import Engine
from engine.prompt_budget import LEAST_CHUNK, PromptBudget
from engine.prompt_rate import PERIOD_S
from engine.sequence import Sequence
from engine.step import Chunk
from engine.step_padding import StepPadding
from engine.step_size import EMPTY, StepSize
from engine.step_time import StepTime
from tests.engine.counting import Counting, make, run, sequence

TARGET_S = 0.010
BIG: dict[str, Any] = {
    "num_blocks": 1001,
    "max_model_len": 2000,
    "max_num_batched_tokens": 512,
    "target_itl_s": TARGET_S,
}


def takes(size: StepSize) -> float:
    """A device's time for a step, in seconds: 4 ms with a few decodes, and 1 ms more for 50 tokens of a prompt."""
    return 0.0039 + 1e-5 * size.num_seqs + 2e-5 * size.num_prompt_tokens + 1e-9 * size.num_prompt_pairs


class Timed:
    """An engine on a device that takes its time, and what it computed."""

    def __init__(self, slowness: float = 1.0, **sizes: Any) -> None:
        self.now = 0.0
        self.model = Counting()
        engine, _ = make(**{**BIG, **sizes})
        self.engine = Engine(engine.config, self.model, clock=lambda: self.now)
        self.slowness = slowness
        self.took_s: list[tuple[StepSize, float]] = []

    def step(self) -> list[Chunk]:
        plan = self.engine.schedule(self.now)
        if plan.chunks:
            size = StepSize.of(plan.chunks)
            self.took_s.append((size, self.slowness * takes(size)))
            self.now += self.took_s[-1][1]
        self.engine.compute(plan)
        self.engine.check_integrity()
        return plan.chunks

    def finish(self) -> None:
        """End the oldest step, if `model.slow`."""
        next(step for step in self.model.steps if step.running).running = False

    def decode(self, num: int, steps: int = 3) -> list[Sequence]:
        """Streams, and a few steps of theirs."""
        streams = [sequence(3, first=10 * i, max_tokens=1900) for i in range(num)]
        for stream in streams:
            self.engine.add(stream)
        for _ in range(steps):
            self.step()
        return streams

    def prefill(self, num_tokens: int, first: int = 0) -> list[int]:
        """The chunks of one more prompt, until its first token."""
        prompt = sequence(num_tokens, first=first, max_tokens=1)
        self.engine.add(prompt)
        lengths = list[int]()
        while not prompt.num_output_tokens:
            lengths += [chunk.length for chunk in self.step() if chunk.sequence is prompt]
        return lengths


def test_without_streams_chunks_are_as_long_as_ever() -> None:
    timed = Timed()
    assert timed.prefill(1000) == [512, 488]
    timed.engine.add(sequence(512 + LEAST_CHUNK, first=2000, max_tokens=1))
    timed.step()
    assert timed.prefill(300, first=4000) == [300], "the last tokens of another prompt are no stream's"


def test_the_first_chunk_is_the_least_one_and_later_ones_keep_the_target() -> None:
    timed = Timed()
    timed.decode(4)
    lengths = timed.prefill(1900)
    assert lengths[0] == LEAST_CHUNK
    assert max(lengths) >= 160, "it does not use what the target leaves"
    mixed = [took_s for size, took_s in timed.took_s[3:] if size.has_prompts]
    assert max(mixed) <= TARGET_S * 1.02
    assert sum(lengths) / sum(mixed) > 10_000


def test_what_many_streams_take_of_the_target_is_not_left_for_prompts() -> None:
    timed = Timed(num_blocks=3001)
    timed.decode(200)
    lengths = timed.prefill(1900)
    mixed = [took_s for size, took_s in timed.took_s[3:] if size.has_prompts]
    assert max(mixed) <= TARGET_S * 1.02
    assert max(lengths) >= 100


def test_a_target_that_cannot_be_kept_still_leaves_each_prompt_its_least_chunk() -> None:
    timed = Timed(target_itl_s=0.001)
    timed.decode(4)
    assert timed.prefill(100) == [32, 32, 32, 4]


def test_where_the_device_pads_chunks_fill_its_sizes() -> None:
    timed = Timed(padding=StepPadding(((32, (96, 160, 224, 480)),)))
    timed.decode(4)
    lengths = timed.prefill(1900)
    assert set(lengths[:-1]) <= {96, 160, 224, 480}
    assert lengths[0] == 96
    assert 224 in lengths


@pytest.mark.parametrize(
    ("launch_s", "start", "length"),
    [
        (None, 0, 480),  # nobody knows what a launch op by op takes
        (0.09, 0, 480),  # too long
        (0.02, 0, 1500),
        (None, 900, 1500),  # there is no graph for so long a prompt, however short the chunk
    ],
)
def test_a_chunk_is_larger_than_every_graph_only_if_launching_it_keeps_the_limit(
    launch_s: float | None, start: int, length: int
) -> None:
    padding = StepPadding(((32, (96, 160, 224, 480)),), most_prompts=1, most_context=2000)
    step_time = StepTime(padding)
    for tokens in (100, 1000, 2000, 2000):
        size = StepSize(5, 400, tokens, tokens * tokens)
        step_time.learn(size, takes(size))
    if launch_s is not None:
        step_time.learn_launch(StepSize(5, 400, 480, 480 * 480), 1.0)  # has a graph: says nothing of others
        step_time.learn_launch(StepSize(5, 400, 2000, 2000 * 2000), launch_s)
    config = make(**{**BIG, "padding": padding, "max_num_batched_tokens": 2048})[0].config
    assert PromptBudget(config, step_time, StepSize(4, 400), 0.08).fitting(start, 1500) == length


@pytest.mark.parametrize(
    ("taken", "limit_s", "most_prompts", "length"),
    [
        (40, 0.009, None, 224 - 40),  # together they fill a graph
        (100, 0.009, None, 224 - 100),  # the smallest one is too small
        (100, 0.0065, None, 0),  # with which the limit would be kept
        (40, 1.0, None, 480 - 40),  # the largest one
        (500, 1.0, None, 0),  # the first is beyond all graphs
        (40, 1.0, 1, 900),  # no graph takes two
    ],
)
def test_a_second_prompt_fills_the_graph_of_the_first(
    taken: int, limit_s: float, most_prompts: int | None, length: int
) -> None:
    padding = StepPadding(((32, (96, 160, 224, 480)),), most_prompts=most_prompts)
    step_time = StepTime(padding)
    for tokens in (96, 160, 224, 480, 480):
        step_time.learn(StepSize(5, 400, tokens, tokens * tokens), takes(StepSize(5, 400, tokens, tokens * tokens)))
    config = make(**{**BIG, "padding": padding, "max_num_batched_tokens": 2048})[0].config
    budget = PromptBudget(config, step_time, StepSize(4, 400), limit_s)
    budget.spend(0, taken, taken)
    assert budget.fitting(0, 900) == length


@pytest.mark.parametrize(
    ("sizes", "forced", "length"),
    [((), 0, LEAST_CHUNK), ((96, 160), 0, 96), ((96, 160), 40, 56), ((96, 160), 80, 80), ((96,), 80, 16)],
)
def test_the_least_chunk_fills_the_smallest_graph(sizes: tuple[int, ...], forced: int, length: int) -> None:
    """If nothing is known yet, or no chunk keeps the limit. Forced tokens of streams are in the graph, too."""
    padding = StepPadding(((32, sizes),) if sizes else ())
    config = make(**{**BIG, "padding": padding})[0].config
    assert PromptBudget(config, StepTime(padding), StepSize(4, 400, forced), 0.08).fitting(0, 900) == length


def test_the_size_of_a_step_counts_each_chunk_with_all_that_it_reads() -> None:
    budget = PromptBudget(make(**BIG)[0].config, StepTime(), StepSize(4, 400, 10, 90), None)
    assert budget.with_chunk(100, 50) == StepSize(5, 400, 60, 90 + 50 * 150)


@pytest.mark.parametrize(("enough", "lengths"), [(None, [500, 12]), (8, [7, 1])])
def test_prompts_join_a_step_until_it_has_enough_tokens(enough: int | None, lengths: list[int]) -> None:
    """By default as many as it may have."""
    config = make(**{**BIG, "saturating_num_tokens": enough})[0].config
    budget = PromptBudget(config, StepTime(), EMPTY, None)
    for length in lengths:
        assert budget.has_room
        budget.spend(0, length, length)
    assert not budget.has_room


def test_prompts_end_in_a_step_that_has_room_for_their_choices() -> None:
    """The first one always; another one beside the choices of streams and of the prompts before it."""
    config = make(**{**BIG, "max_num_seqs": 8})[0].config
    budget = PromptBudget(config, StepTime(), StepSize(4, 400), None, num_choices=4)
    assert budget.fitting(0, 10, num_samples=9) == 10
    budget.spend(0, 10, 10, num_samples=3)
    assert [budget.fitting(0, 10, num_samples) for num_samples in (1, 2)] == [10, 0]
    assert budget.fitting(0, 9000, num_samples=2) == 502, "it does not end"


def test_a_second_prompt_has_what_the_first_one_leaves() -> None:
    timed = Timed()
    timed.decode(4)
    timed.prefill(1000)
    first, second = sequence(40, first=3000, max_tokens=9), sequence(300, first=4000, max_tokens=9)
    third = sequence(8, first=5000)
    for seq in (first, second, third):
        timed.engine.add(seq)
    chunks = {chunk.sequence: chunk.length for chunk in timed.step()}
    assert chunks[first] == 40
    assert LEAST_CHUNK <= chunks[second] < 300
    assert third not in chunks, "it overtook one that was cut short"


def test_only_what_the_prefix_cache_lacks_counts() -> None:
    timed = Timed()
    timed.decode(4)
    timed.prefill(600, first=0)
    again = sequence(620, first=0, max_tokens=1)
    timed.engine.add(again)
    timed.step()
    assert again.num_output_tokens == 1


def test_a_sequence_to_hand_off_is_no_stream() -> None:
    timed = Timed()
    timed.engine.add(sequence(40, first=0, hand_off=True))
    assert timed.prefill(300, first=1000) == [300]


@pytest.mark.parametrize(("fields", "length"), [({"runs_ahead": False}, LEAST_CHUNK), ({"hand_off": True}, 300)])
def test_who_waits_for_the_token_of_a_launched_step_is_a_stream_unless_it_is_to_hand_off(
    fields: dict[str, Any], length: int
) -> None:
    engine, _ = make(**BIG, async_scheduling=True)
    engine.add(sequence(40, first=0, **fields))
    engine.compute(engine.schedule(0.0))
    engine.add(sequence(300, first=1000))
    assert [chunk.length for chunk in engine.schedule(0.0).chunks] == [length]


def test_a_step_that_hung_does_not_stop_prompts() -> None:
    timed = Timed()
    timed.decode(4)
    timed.prefill(1000)
    timed.slowness = 500.0
    timed.step()
    timed.slowness = 1.0
    assert max(timed.prefill(1900, first=5000)) >= 96


def test_the_load_says_how_fast_a_prompt_would_be_computed() -> None:
    timed = Timed()
    assert timed.engine.prompt_tokens_per_s == 0, "nothing is known of prompts yet"
    timed.decode(4)
    timed.prefill(1900)
    timed.now += PERIOD_S
    rate = timed.engine.prompt_tokens_per_s
    assert 15_000 < rate < 40_000  # some 250 of 10 ms
    timed.decode(200, steps=5)
    timed.now += PERIOD_S
    assert timed.engine.prompt_tokens_per_s < 0.95 * rate, "streams slow prompts down"
    assert make()[0].prompt_tokens_per_s == 0


def test_prompts_are_not_taken_for_streams_that_slow_others_down() -> None:
    """As on a node that only computes prompts: there the target limits nothing."""
    timed = Timed()
    timed.prefill(1900)
    timed.now += PERIOD_S
    idle = timed.engine.prompt_tokens_per_s
    timed.engine.add(sequence(1900, first=7000))
    timed.step()
    timed.step()
    timed.now += PERIOD_S
    assert timed.engine.prompt_tokens_per_s == pytest.approx(idle, rel=0.1)


@given(
    decodes=st.integers(1, 64),
    learned=st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 512), st.floats(0.1, 10.0)), max_size=20),
    prompts=st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 3000)), min_size=1, max_size=5),
    limit_s=st.floats(1e-3, 0.1),
    sizes=st.sampled_from([(), (96, 352, 480)]),
)
def test_the_prediction_keeps_the_limit_or_the_chunk_is_the_least(
    decodes: int, learned: Seq[tuple[int, int, float]], prompts: Seq[tuple[int, int]], limit_s: float, sizes: Any
) -> None:
    padding = StepPadding(((10_000, sizes),) if sizes else ())
    step_time, beside = StepTime(padding), StepSize(decodes, decodes * 100)
    for start, length, slowness in learned:
        size = StepSize(decodes + 1, decodes * 100, length, length * (start + length))
        step_time.learn(size, slowness * takes(size))
    config = make(**{**BIG, "padding": padding})[0].config
    budget = PromptBudget(config, step_time, beside, limit_s)
    total = 0
    for start, to_go in prompts:
        if not budget.has_room:
            break
        length = budget.fitting(start, to_go)
        assert length or total, "the first prompt makes no progress"
        if not length:
            break
        predicted = step_time.predict(budget.with_chunk(start, length))
        least = total == 0 and length == min(to_go, sizes[0] if sizes else LEAST_CHUNK)
        assert least or (predicted is not None and predicted <= limit_s)
        budget.spend(start, length, to_go)
        total += length
        assert length == to_go or not budget.has_room
    assert 0 < total <= config.max_num_batched_tokens
    assert not sizes or total <= sizes[-1], "no graph is so large"


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12), st.integers(1, 3)), min_size=1, max_size=6),
    st.booleans(),
    st.sampled_from([12, 33]),
)
def test_the_target_changes_no_token(wanted: Seq[tuple[int, int, int]], ahead: bool, num_blocks: int) -> None:
    """Though blocks are short and sequences are preempted and fork."""

    def outputs(**sizes: Any) -> dict[tuple[int, int], list[int]]:
        engine, _ = make(num_blocks=num_blocks + 5, max_num_seqs=4, async_scheduling=ahead, **sizes)
        seqs = [
            sequence(min(n, 40), first=100 * i, max_tokens=out, samples=samples)
            for i, (n, out, samples) in enumerate(wanted)
        ]
        for seq in seqs:
            engine.add(seq)
        numbers = {seq.attempt_id: i for i, seq in enumerate(seqs)}
        said = dict[tuple[int, int], list[int]]()
        for result in run(engine, 2000):
            for token in result.sampled:
                said.setdefault((numbers[token.sequence.attempt_id], token.sample), []).append(token.token)
        assert not engine.has_work
        return said

    assert outputs(target_itl_s=1e-9, padding=StepPadding(((4, (2, 5)),)), max_num_batched_tokens=64) == outputs(
        max_num_batched_tokens=64
    )


@pytest.mark.parametrize("size", [EMPTY, StepSize(5, 1000)])
def test_no_limit_is_no_limit(size: StepSize) -> None:
    budget = PromptBudget(make(**BIG)[0].config, StepTime(), size, None)
    assert budget.fitting(0, 9000) == 512


def chunk_of_a_launch(late_s: float, has_ended: bool) -> int:
    """The first chunk of a prompt in a step that is launched this long after the one before it was to end."""
    timed = Timed(async_scheduling=True)
    timed.model.slow = True
    for tokens in (100, 200, 400, 500):
        size = StepSize(5, 100, tokens, tokens * tokens)
        timed.engine._timing.step_time.learn(size, takes(size))
    for i in range(4):
        timed.engine.add(sequence(3, first=10 * i, max_tokens=1900))
    engine = timed.engine
    for _ in range(6):
        engine.compute(engine.schedule(timed.now), wait=False)  # launched as the step before it begins
        step_s = takes(StepSize.of(timed.model.batches[-1]))
        if len(engine._in_flight) > 1:
            timed.now += step_s
            timed.finish()
            engine.retire()
    began = engine.device_busy_since
    assert began is not None
    if has_ended:
        timed.finish()
    engine.add(sequence(1900, first=1000))
    plan = engine.schedule(began + step_s + late_s)
    return next(chunk.length for chunk in plan.chunks if not chunk.is_decode)


def test_how_late_a_step_begins_is_part_of_the_gap() -> None:
    on_time, late, too_late = (chunk_of_a_launch(late_s, has_ended=late_s > 0) for late_s in (-0.003, 0.003, 0.1))
    assert on_time > late + 100
    assert late > LEAST_CHUNK == too_late


def test_a_step_that_takes_longer_than_usual_leaves_the_next_one_as_much_of_a_prompt() -> None:
    assert chunk_of_a_launch(0.1, has_ended=False) == chunk_of_a_launch(0.0, has_ended=False)
