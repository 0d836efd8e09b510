"""A step's arrays: where its chunks lie in them, with and without places kept free for decodes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.messages import AttemptId
from baton.sampling import SamplingParams
from engine.config import EngineConfig
from engine.model.batch import BatchSize, _cut, pack, sample_batch
from engine.model.input_batch import InputBatch
from engine.model.sampler import Sampler
from engine.sequence import Sequence
from engine.step import Chunk

lengths = st.integers(2, 9)
starts = st.integers(0, 5)


def chunk(number: int, start: int, length: int, rest: int) -> Chunk:
    tokens = tuple(100 * number + i for i in range(start + length + rest))
    seq = Sequence(AttemptId(1, str(number), 0), [0], tokens, SamplingParams())
    return Chunk.of(seq, start, length)


@given(
    decodes=st.lists(starts, max_size=4),
    prompts=st.lists(st.tuples(starts, lengths, st.integers(0, 1)), min_size=1, max_size=3),
    spare=st.integers(0, 3),
    with_places=st.booleans(),
)
def test_each_token_lies_where_its_sequence_begins(
    decodes: list[int], prompts: list[tuple[int, int, int]], spare: int, with_places: bool
) -> None:
    chunks = [chunk(i, start, 1, 0) for i, start in enumerate(decodes)]
    chunks += [chunk(len(decodes) + i, *prompt) for i, prompt in enumerate(prompts)]
    places = len(decodes) + spare if with_places else 0
    free = spare if with_places else 0
    num_tokens = free + sum(c.length for c in chunks)
    size = BatchSize(free + len(chunks) + 2, num_tokens + 3, len(chunks) + 2)
    rows = [10 + i for i in range(len(chunks))]
    packed = torch.from_numpy(pack(chunks, rows, size, places if with_places else None))
    row, start, context, token_rows, positions, host_tokens, keep = (array.tolist() for array in _cut(packed, size))
    assert start[: places + 1] == list(range(places + 1)), "a decode's token is found by its place"
    seen, kept = set[int](), list[int]()
    for number, (c, own) in enumerate(zip(chunks, rows, strict=True)):
        seq = number if number < len(decodes) else number + free
        assert (row[seq], context[seq], start[seq + 1] - start[seq]) == (own, c.end, c.length)
        tokens = range(start[seq], start[seq + 1])
        assert [token_rows[t] for t in tokens] == [own] * c.length
        assert [positions[t] for t in tokens] == list(range(c.start, c.end))
        assert [host_tokens[t] for t in tokens] == list(c.sequence.tokens[c.start : c.end])
        seen |= set(tokens)
        kept += [tokens[-1]] if c.samples_token else []
    assert all(token_rows[t] == -1 for t in range(size.num_tokens) if t not in seen), (
        "padding writes into somebody's KV"
    )
    assert keep[: len(kept)] == kept
    assert set(keep[len(kept) :]) <= {0}
    padding = [i for i in range(size.num_seqs) if not context[i]]
    assert len(padding) == size.num_seqs - len(chunks)
    assert all(start[i + 1] == start[i] for i in padding if i >= places)


def test_a_token_is_drawn_for_its_position_which_is_the_number_of_those_before_it() -> None:
    """Whatever is beside it in the step, and however its prompt was cut: the next node draws for the same."""
    alone, cut, middle, several = chunk(0, 0, 5, 0), chunk(1, 3, 2, 0), chunk(2, 0, 4, 2), chunk(3, 6, 1, 0)
    several.sequence.samples = [0, 2]
    drawn = sample_batch([alone, cut, middle, several], [10, 11, 12, 13])
    assert drawn.positions == [5, 5, 7, 7]
    assert drawn.logits_rows == [0, 1, 2, 2]
    assert drawn.rows == [10, 11, 13, 13]
    assert drawn.samples == [0, 0, 0, 2]


def test_a_token_that_only_the_device_knows_has_its_place() -> None:
    ahead = chunk(1, 2, 4, 0)
    ahead.sequence.tokens.pop()  # a launched step samples it
    packed = torch.from_numpy(pack([ahead], [5], BatchSize(1, 4, 1)))
    arrays = [array.tolist() for array in _cut(packed, BatchSize(1, 4, 1))]
    row, start, context, token_rows, positions, host_tokens, keep = arrays
    assert host_tokens == [102, 103, 104, -1]
    assert (row, start, context, keep) == ([5], [0, 4], [6], [3])
    assert (token_rows, positions) == ([5] * 4, [2, 3, 4, 5])


def test_padding_of_a_graph_has_no_row() -> None:
    size = BatchSize(4, 4)
    packed = torch.from_numpy(pack([chunk(0, 3, 1, 0), chunk(1, 0, 1, 0)], [7, 0], size, 4))
    _, start, contexts, token_rows, positions, tokens, keep = (array.tolist() for array in _cut(packed, size))
    assert token_rows == [7, 0, -1, -1]
    assert positions[:2] == [3, 0]
    assert tokens[:2] == [3, 100]
    assert contexts == [4, 1, 0, 0]
    assert start == [0, 1, 2, 3, 4]
    assert keep == [], "all tokens have logits"


def test_draft_tokens_follow_the_sequences_own_and_each_has_logits_for_its_position() -> None:
    cut_short, alone, guessed, cut = chunk(3, 0, 1, 2), chunk(0, 4, 1, 0), chunk(1, 5, 1, 0), chunk(2, 0, 3, 2)
    guessed.sequence.draft_tokens = (8, 9)
    guessed = Chunk.of(guessed.sequence, 5, 3)
    chunks, rows = [cut_short, alone, guessed, cut], [9, 10, 11, 12]
    size = BatchSize.of(chunks)
    assert (size.num_seqs, size.num_tokens, size.num_rows) == (4, 8, 4)
    packed = torch.from_numpy(pack(chunks, rows, size))
    _, start, contexts, _, positions, tokens, keep = (array.tolist() for array in _cut(packed, size))
    assert (start, contexts) == ([0, 1, 2, 5, 8], [1, 5, 8, 3])
    assert positions == [0, 4, 5, 6, 7, 0, 1, 2]
    assert tokens == [300, 4, 105, 8, 9, 200, 201, 202]
    assert keep == [1, 2, 3, 4]
    drawn = sample_batch(chunks, rows)
    assert drawn.logits_rows == [0, 1, 2, 3]
    assert drawn.rows == [10, 11, 11, 11]
    assert drawn.positions == [5, 6, 7, 8]


def test_tables_of_groups_lie_one_behind_the_other_and_name_no_null_block() -> None:
    """Two groups, the second with a window of 6: of two columns the first one is behind it."""
    config = EngineConfig(
        num_blocks=20,
        max_model_len=16,
        vocab_size=1000,
        block_size=4,
        max_num_seqs=3,
        max_num_batched_tokens=4,
        windows=(None, 6),
    )
    batch = InputBatch(config, Sampler(3, 1000, (), torch.device("cpu")))
    step = chunk(0, 9, 1, 3)
    step.sequence.block_table = [5, 0, 6, 7, 8, 9]
    (row,), tables = batch.place([step])
    starts = [(group * 3 + row) * 4 for group in range(2)]  # of rows with four columns
    assert tables.tolist() == [[*range(starts[0], starts[0] + 3), *range(starts[1], starts[1] + 3)], [5, 6, 8, 7, 7, 9]]
    step.sequence.block_table += [10, 11]
    step.sequence.block_table[3] = 0  # given back: the device need not know
    _, tables = batch.place([step])
    assert tables.tolist() == [[starts[0] + 3, starts[1] + 3], [10, 11]]
