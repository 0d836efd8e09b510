"""Reasoning that has had its tokens is ended, whichever node goes on with it."""

from __future__ import annotations

import pytest
import torch

from baton.logits_processors import THINKING_BUDGET, LogitsProcessor
from node.logits_processors import OWN, LogitsProcessors

THINK, END, CALL, BLANK, WORD, OTHER = 0, 1, 2, 3, 4, 5


def chosen(written: list[int], budget: int, begins_open: bool = False) -> list[int]:
    """What an answer becomes of which the model would write this, alone."""
    arguments = [budget, [END, CALL], [THINK], begins_open]
    chain = LogitsProcessors(OWN).chain([LogitsProcessor.of(THINKING_BUDGET, arguments, None)])
    assert chain is not None
    output: list[int] = []
    for token in written:
        logits = torch.zeros(6)
        logits[token] = 9.0
        output.append(int(chain((), output, logits).argmax()))
    return output


@pytest.mark.parametrize(
    ("written", "becomes"),
    [
        ([THINK, WORD, WORD, WORD, WORD, WORD], [THINK, WORD, WORD, END, WORD, WORD]),
        ([THINK, WORD, WORD, END, WORD, WORD], [THINK, WORD, WORD, END, WORD, WORD]),
        ([THINK, WORD, END, WORD, WORD, WORD], [THINK, WORD, END, WORD, WORD, WORD]),
        ([THINK, WORD, CALL, WORD, WORD, WORD], [THINK, WORD, CALL, WORD, WORD, WORD]),
        ([BLANK, THINK, WORD, WORD, WORD, WORD], [BLANK, THINK, WORD, WORD, END, WORD]),
        ([WORD, WORD, WORD, WORD, WORD, WORD, THINK, WORD, WORD, WORD], None),
    ],
)
def test_reasoning_ends_when_it_has_had_its_tokens(written: list[int], becomes: list[int] | None) -> None:
    assert chosen(written, 2) == (becomes or written)


def test_reasoning_that_the_template_began_counts_from_the_first_token() -> None:
    assert chosen([WORD] * 4, 2, begins_open=True) == [WORD, WORD, END, WORD]
    assert chosen([THINK] + [WORD] * 4, 2, begins_open=True) == [THINK, WORD, WORD, END, WORD]
    assert chosen([WORD] * 3, 0, begins_open=True) == [END, WORD, WORD]
