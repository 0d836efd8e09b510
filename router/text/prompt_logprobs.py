"""A prompt and the logprobs of its tokens, as clients get them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.errors import InvalidRequest
from baton.prompt_logprobs import PromptLogprobs, PromptTokenLogprob
from router.text.generation_request import GenerationRequest
from router.text.models import ServedModel
from router.text.num_logprobs import num_prompt_logprobs


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """`pieces`: logprobs of all tokens but the first."""

    token_ids: tuple[int, ...]
    pieces: tuple[PromptLogprobs, ...]

    def scores(self) -> Iterator[tuple[int, PromptTokenLogprob | None]]:
        """Each token with its logprobs; the first has none."""
        yield self.token_ids[0], None
        logprobs = (entry for piece in self.pieces for entry in piece)
        yield from zip(self.token_ids[1:], logprobs, strict=True)

    @property
    def size(self) -> int:
        """How many logprobs it has."""
        return sum(piece.num_tokens * (1 + piece.num_top) for piece in self.pieces)


def check_prompt_logprobs(wanted: Sequence[tuple[GenerationRequest, int]], model: ServedModel) -> None:
    """Raises InvalidRequest if the model does not tell so many, or the answers would repeat too many. wanted: the
    request of each prompt of one generation, with the number of the prompt's tokens."""
    count = most = 0
    for one, num_tokens in wanted:
        if "num_prompt_logprobs" in one.sampling:
            num_top = num_prompt_logprobs(one.sampling["num_prompt_logprobs"], model)
            count += one.n * (1 + num_top) * num_tokens
            most = one.logprob_limits.of_prompts
    if count > most:
        raise InvalidRequest(
            f"prompt_logprobs may give at most {most} logprobs of all answers' prompts here, not {count}",
            "prompt_logprobs",
        )
