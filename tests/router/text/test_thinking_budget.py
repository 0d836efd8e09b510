"""How a budget of reasoning reaches the nodes: with the marks of the reasoning, as tokens."""

from __future__ import annotations

import pytest

from baton.errors import InvalidRequest
from baton.logits_processors import THINKING_BUDGET, LogitsProcessor
from router.reasoning_parsers import REASONING_PARSERS
from router.reasoning_parsers.tags import TagParser
from router.text.answer_reader import AnswerReading, Parsers
from router.text.generation_request import GenerationRequest
from router.text.thinking_budget import with_thinking_budget
from tests.router.tiny_tokenizer import BOS, EOT, tiny_tokenizer


class Marked(TagParser):
    """Reasoning from one token of the tests' tokenizer to another one, or to a text of several."""

    opening = "<|bos|>"
    closing = "<|endoftext|>"
    also_closing = ("several tokens",)


def processors(parser: type[TagParser] | None, prompt: str, begun: str | None = None) -> tuple[LogitsProcessor, ...]:
    """Of a request that has one of its own, with a budget of 5 tokens."""
    reading = AnswerReading(Parsers(reasoning=parser), prompt, {}, begun=begun)
    own = LogitsProcessor("own")
    wanted = GenerationRequest(request_id="r", prompts=(prompt,), sampling={"logits_processors": (own,)})
    first, *others = with_thinking_budget(wanted, 5, reading, tiny_tokenizer()).sampling["logits_processors"]
    assert first == own
    return tuple(others)


@pytest.mark.parametrize(("prompt", "begins_open"), [("hi", False), ("hi<|bos|>\n", True)])
def test_nodes_are_told_the_marks_that_are_one_token(prompt: str, begins_open: bool) -> None:
    (bound,) = processors(Marked, prompt)
    assert (bound.name, bound.parsed()[0]) == (THINKING_BUDGET, [5, [EOT], [BOS], begins_open])


def test_an_answer_that_does_not_reason_needs_no_bound() -> None:
    assert processors(Marked, "hi<|bos|>\n<|endoftext|>\n") == ()
    assert processors(Marked, "hi", begun="So: ") == ()


def test_what_cannot_be_bounded_is_refused() -> None:
    for parser, why in (
        (None, "needs --reasoning-parser"),
        (REASONING_PARSERS["qwen3"], "to which `</think>` is one token"),
        (REASONING_PARSERS["gpt_oss"], "not supported with this router's --reasoning-parser"),
    ):
        with pytest.raises(InvalidRequest, match=why) as refusal:
            processors(parser, "hi")  # type: ignore[arg-type]
        assert refusal.value.param == "thinking_token_budget"
