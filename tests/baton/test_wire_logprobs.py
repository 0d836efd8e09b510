"""Logprobs on the wire: how many a message may have, and that many are read as they were written."""

from __future__ import annotations

import array
import math

import pytest

from baton import wire
from baton.messages import AttemptId, End, TokenLogprobs, Tokens, Update
from baton.prompt_logprobs import PromptLogprobs
from baton.v1 import node_pb2

WORK = AttemptId(1, "r", 0)


def piece(count: int, num_top: int) -> node_pb2.NodeMessage:
    numbers = [array.array(kind, [1] * size).tobytes() for kind, size in zip("fI", (count, count), strict=True)]
    top = [array.array(kind, [1] * count * num_top).tobytes() for kind in "If"]
    return wire.write_node_message((Update(WORK, PromptLogprobs(1, num_top, *numbers, *top)),))


@pytest.mark.parametrize(
    ("count", "num_top", "fits"),
    [
        *[(1024, 0, True), (1025, 0, False), (1024, 20, True), (1025, 20, False)],
        *[(512, 41, True), (513, 41, False), (1, 50_000, True), (2, 50_000, False)],
    ],
)
def test_a_piece_of_a_prompts_logprobs_is_of_bounded_size(count: int, num_top: int, fits: bool) -> None:
    """A single token may have as many as the model tells."""
    message = piece(count, num_top)
    (update,) = wire.read_node_message(message, wire.Limits(max_logprobs=50_000))  # type: ignore[misc]
    assert isinstance(update.kind, PromptLogprobs) is fits
    (update,) = wire.read_node_message(message, wire.Limits(max_logprobs=num_top - 1))  # type: ignore[misc]
    assert isinstance(update.kind, End)


@pytest.mark.parametrize("count", [20, 21, 5_000])
def test_logprobs_of_many_tokens_are_read_as_they_were_written(count: int) -> None:
    """More than the context has tokens, too."""
    top = tuple((token, -token / 4) for token in range(count))
    said = Update(WORK, Tokens(0, 0, (1,), (TokenLogprobs(-0.5, top),)))
    limits = wire.Limits(vocab_size=count, max_model_len=16, max_logprobs=count)
    (read,) = wire.read_node_message(wire.write_node_message((said,)), limits)  # type: ignore[misc]
    assert read == said
    assert wire.write_node_message((read,)) == wire.write_node_message((said,))
    for wrong in (math.nan, math.inf):
        spoilt = Tokens(0, 0, (1,), (TokenLogprobs(-0.5, (*top[:-1], (0, wrong))),))
        (read,) = wire.read_node_message(wire.write_node_message((Update(WORK, spoilt),)), limits)  # type: ignore[misc]
        assert isinstance(read.kind, End)
