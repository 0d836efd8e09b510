"""A sequence changes hands: parked for a decode node, adopted by one, forked into one for each sample."""

from __future__ import annotations

from typing import Any

import pytest

from baton.block_hash import next_hash, root_hash
from engine.sequence import SequenceState
from tests.engine.counting import make, run, sequence


def test_a_prompt_to_hand_off_is_parked_with_its_tokens_until_released() -> None:
    engine, _ = make(max_num_batched_tokens=4)
    seq = sequence(6, samples=3, hand_off=True, max_tokens=1)
    engine.add(seq)
    first, second = engine.compute(engine.schedule(0.0)), engine.compute(engine.schedule(1.0))
    assert (first.advanced, first.sampled) == ([seq], [])
    assert second.advanced == [seq]
    assert seq.state is SequenceState.PARKED
    assert [(t.sequence, t.sample, t.index) for t in second.sampled] == [(seq, 0, 0), (seq, 1, 0), (seq, 2, 0)]
    assert list(seq.tokens) == list(seq.prompt_tokens)
    assert not engine.has_work
    engine.check_integrity()
    engine.sequences.release(seq)
    assert engine.blocks.num_free + engine.blocks.num_cached == engine.blocks.num_total


def test_samples_fork_sharing_full_blocks_and_copying_the_partial_one() -> None:
    engine, model = make()
    parent = sequence(6, samples=3, max_tokens=9)
    engine.add(parent)
    forks = [token.sequence for token in engine.compute(engine.schedule(0.0)).sampled]
    engine.check_integrity()
    assert parent.state is SequenceState.FINISHED
    assert [fork.samples for fork in forks] == [[0], [1], [2]]
    assert len({fork.block_table[0] for fork in forks}) == 1
    last = [fork.block_table[1] for fork in forks]
    assert model.copies == [(last[0], last[1]), (last[0], last[2])]
    run(engine)


def test_forks_at_a_block_boundary_copy_nothing() -> None:
    engine, model = make()
    engine.add(sequence(8, samples=2))
    run(engine)
    assert not model.copies


def test_forks_without_a_place_wait_and_lose_nothing() -> None:
    engine, model = make(max_num_seqs=2)
    engine.add(sequence(6, samples=5))
    tokens = [token for result in run(engine) for token in result.sampled]
    for sample in range(5):
        assert [token.token for token in tokens if token.sample == sample] == [10, 11, 12, 13]
    assert max(len(batch) for batch in model.batches) == 2


@pytest.mark.parametrize("windows", [(None,), (None, 60)])
@pytest.mark.parametrize(("num_prompt", "num_columns"), [(6, 1), (8, 2)])
def test_forks_without_blocks_wait_and_lose_nothing(
    num_prompt: int, num_columns: int, windows: tuple[int | None, ...]
) -> None:
    """The columns that are left are enough for two of five, the first of which writes on in a partly filled one."""
    engine, _ = make(num_blocks=66, windows=windows)
    engine.add(sequence(num_prompt, samples=5))
    plan = engine.schedule(0.0)
    lease = engine.allocate(engine.blocks.num_unclaimed - num_columns * len(windows))
    tokens = engine.compute(plan).sampled
    assert [token.sequence.state is SequenceState.RUNNING for token in tokens] == [True] * 2 + [False] * 3
    assert not engine.blocks.num_unclaimed
    engine.blocks.release(lease)
    tokens += [token for result in run(engine) for token in result.sampled]
    for sample in range(5):
        assert [token.token for token in tokens if token.sample == sample] == [10, 11, 12, 13]


def test_samples_that_end_with_their_first_token_are_finished() -> None:
    engine, _ = make()
    engine.add(sequence(6, samples=2, max_tokens=1))
    tokens = engine.compute(engine.schedule(0.0)).sampled
    assert [token.sequence.state for token in tokens] == [SequenceState.FINISHED] * 2


def test_a_fork_has_what_its_prompt_has() -> None:
    given: dict[str, Any] = {"cache_salt": "mine", "arrived_s": 1.0, "age_s": 2.0, "priority": 3, "runs_ahead": False}
    prompt = sequence(6, samples=2, **given, extensions={"name": 7})
    prompt.num_cached_tokens, prompt.started_s = 4, 5.0
    fork = prompt.child(1, (10, 11))
    had = ("attempt_id", "prompt_tokens", "sampling", *given, "extensions", "num_cached_tokens", "started_s")
    assert [getattr(fork, name) for name in had] == [getattr(prompt, name) for name in had]
    assert (fork.samples, fork.output_tokens) == ([1], (10, 11))


def test_blocks_that_forks_fill_have_the_salt_of_their_prompt() -> None:
    engine, _ = make()
    engine.add(sequence(3, samples=2, max_tokens=4, cache_salt="mine"))
    run(engine)
    tokens = (50, 51, 52, 10)
    assert [len(engine.blocks.match([next_hash(root_hash(salt), tokens)])) for salt in ("mine", "")] == [1, 0]


def test_adoption_loses_no_step_and_names_the_prompts_blocks() -> None:
    engine, model = make()
    seq = sequence(9, max_tokens=4)
    seq.block_table = engine.allocate(9 // 4 + 2)
    spare = seq.block_table.pop()
    forks = engine.adopt(seq, {0: (10,), 3: (11,)}, [spare])
    engine.check_integrity()
    assert model.copies == [(forks[0].block_table[2], spare)]
    assert len(engine.blocks.match(forks[1].block_hashes(2, 4))) == 2
    plan = engine.schedule(0.0)
    result = engine.compute(plan)
    assert [(c.start, c.length) for c in model.batches[0]] == [(9, 1), (9, 1)]
    assert [(t.sample, t.index) for t in result.sampled] == [(0, 1), (3, 1)]
    assert not plan.started
    assert not result.advanced


def test_adopted_blocks_keep_the_names_that_came_with_them() -> None:
    engine, _ = make()
    seq = sequence(9, max_tokens=8)
    seq.block_table, names = engine.allocate(3), [b"a" * 32, b"b" * 32]
    seq.set_block_hashes(names)
    (running,) = engine.adopt(seq, {0: (10,)}, [])
    table = running.block_table
    assert [engine.blocks.hash_of(block) for block in table[:2]] == names
    for _ in range(3):
        engine.compute(engine.schedule(0.0))
    assert engine.blocks.hash_of(table[2]) == next_hash(names[-1], running.tokens[8:12])
