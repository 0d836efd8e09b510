"""How many logprobs a request asks for, and how many it may: its model's nodes say so (--max-logprobs)."""

from __future__ import annotations

from dataclasses import dataclass

from baton.errors import InvalidRequest
from router.limits import MAX_ANSWER_LOGPROBS, MAX_PROMPT_LOGPROBS, MAX_STREAMED_LOGPROBS
from router.text.models import ServedModel

ALL = -1
"""As a number of logprobs: those of the whole vocabulary, as in vLLM."""
_UNLIMITED = 2**63


@dataclass(frozen=True, slots=True)
class LogprobLimits:
    """How many logprobs one request may get: of all answers' prompts; of what comes at once of an answer, a token or a
    whole beam; and of all answers. The last two bind only where a token has more than by default."""

    of_prompts: int
    at_once: int
    of_answers: int


WHOLE = LogprobLimits(MAX_PROMPT_LOGPROBS, MAX_ANSWER_LOGPROBS, MAX_ANSWER_LOGPROBS)
STREAMED = LogprobLimits(MAX_STREAMED_LOGPROBS, MAX_STREAMED_LOGPROBS, MAX_ANSWER_LOGPROBS)
"""One chunk has all of an answer's prompt, and all that has come at once."""
UNLIMITED = LogprobLimits(_UNLIMITED, _UNLIMITED, _UNLIMITED)
"""Of a process that answers only itself."""


def num_logprobs(asked: int, model: ServedModel) -> int | None:
    """The number that is asked for; None: the model tells fewer."""
    if asked == ALL and _tells_all(model):
        return model.vocab_size
    return asked if 0 <= asked <= model.max_logprobs else None


def logprobs_range(model: ServedModel) -> str:
    """What may be asked for, in errors."""
    return f"[{ALL if _tells_all(model) else 0}, {model.max_logprobs}]"


def num_sample_logprobs(asked: int, model: ServedModel) -> int:
    """Of each token of an answer. Raises InvalidRequest."""
    if (count := num_logprobs(asked, model)) is not None:
        return count
    rule = f"must be at most {model.max_logprobs}" if asked > 0 else "must be 0 or more"
    raise InvalidRequest(f"logprobs {rule}, not {asked}", "logprobs")


def num_prompt_logprobs(asked: int, model: ServedModel) -> int:
    """Of each token of a prompt. Raises InvalidRequest."""
    if (count := num_logprobs(asked, model)) is not None:
        return count
    raise InvalidRequest(f"prompt_logprobs must be in {logprobs_range(model)}, not {asked}", "prompt_logprobs")


def _tells_all(model: ServedModel) -> bool:
    return model.max_logprobs >= model.vocab_size
