"""Bounds the reasoning of answers: by a logits processor that nodes have, which knows the marks of the reasoning."""

from __future__ import annotations

import dataclasses

from baton.errors import InvalidRequest
from baton.logits_processors import THINKING_BUDGET, LogitsProcessor
from router.text.answer_reader import AnswerReading
from router.text.generation_request import GenerationRequest
from router.text.tokenizer import Tokenizer

PARAM = "thinking_token_budget"


def with_thinking_budget(
    wanted: GenerationRequest, budget: int, reading: AnswerReading | None, tokenizer: Tokenizer
) -> GenerationRequest:
    """The request whose answers have at most `budget` tokens of reasoning. Raises InvalidRequest."""
    if reading is None or not reading.parts_reasoning:
        raise InvalidRequest(f"`{PARAM}` needs --reasoning-parser, which this router lacks.", PARAM)
    marks = reading.reasoning_marks()
    if marks is None:
        return wanted
    ends = [tokenizer.encode(text, False) for text in marks.ends]
    if len(ends[0]) != 1:
        raise InvalidRequest(f"`{PARAM}` needs a model to which `{marks.ends[0]}` is one token.", PARAM)
    opening = list(tokenizer.encode(marks.opening, False))
    single = [tokens[0] for tokens in ends if len(tokens) == 1]
    processor = LogitsProcessor.of(THINKING_BUDGET, [budget, single, opening, marks.begins_open], None)
    others = wanted.sampling.get("logits_processors", ())
    return dataclasses.replace(wanted, sampling={**wanted.sampling, "logits_processors": (*others, processor)})


def with_thinking_target(
    wanted: GenerationRequest, budget: int, reading: AnswerReading | None, tokenizer: Tokenizer
) -> GenerationRequest:
    """The same where the budget is a target, as at Anthropic: reasoning that cannot be bounded is not refused."""
    try:
        return with_thinking_budget(wanted, budget, reading, tokenizer)
    except InvalidRequest:
        return wanted
