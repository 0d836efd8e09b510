"""The choices of a step: which tokens to sample, and the sampled tokens."""

from __future__ import annotations

import array
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from baton.messages import TokenLogprobs
from baton.top_tokens import MOST_PAIRS, TopTokens, top_tokens
from engine.model.processed_logits import ProcessedLogits, ToProcess
from engine.model.upload import download
from engine.step import Choice
from engine.token_matcher import TokenMatcher


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """The choices of one step: item i of each list, or integer array, belongs to choice i.

    logits_rows: the row of its logits. rows: the sequence's row in the sampler. samples: the number of the sample
    within the request. positions: the new token's position in its sequence, which is the number of tokens before it.
    Several samples of one prompt share both rows. Choices after draft tokens share the sequence's row, at different
    positions; `last_tokens` may then hold any of these tokens, since the host supplies the sequence's next token.
    tokens: the sequence's prompt and output, as far as the host knows them: all tokens before `positions`, or all but
    the last one. Read during `prepare`, for sequences with bad words.
    matchers: (choice, matcher) for the choices that have one. to_process: the choices with logits processors.
    """

    logits_rows: Seq[int] | NDArray[np.integer]
    rows: Seq[int] | NDArray[np.integer]
    samples: Seq[int] | NDArray[np.integer]
    positions: Seq[int] | NDArray[np.integer]
    tokens: Seq[Seq[int]] = ()
    matchers: Seq[tuple[int, TokenMatcher]] = ()
    to_process: Seq[ToProcess] = ()


class Sampled:
    """The choices that a launched step makes. tokens: [num_choices], int32, on the device."""

    processed: ProcessedLogits | None = None

    def __init__(self, tokens: Tensor, logprobs: tuple[Tensor, ...] = (), asked: Seq[tuple[int, int]] = ()) -> None:
        """asked: (choice, number of logprobs) pairs. logprobs, for these choices: the chosen token's, [num_asked], and
        the logprobs and ids of the most likely tokens, [num_asked, width] each."""
        self.tokens = tokens
        self._tensors = (tokens, *logprobs)
        self._asked = asked

    def to_host(self) -> None:
        """Start the copies to the host, on the current stream."""
        self._tensors = tuple(download(tensor) for tensor in self._tensors)
        if self.processed is not None:
            self.processed.to_host()

    def choices(self) -> list[Choice]:
        """One per choice of the batch. The caller must make sure that the copies of `to_host` are done."""
        tokens: list[int] = self._tensors[0].tolist()
        choices = [Choice(token) for token in tokens]
        if self._asked:
            _, chosen, values, ids = self._tensors
            for (i, _), own, top in zip(self._asked, chosen.tolist(), self._tops(values, ids), strict=True):
                choices[i] = Choice(tokens[i], TokenLogprobs(own, top))
        for i, failure in (self.processed.failed() if self.processed is not None else {}).items():
            choices[i] = Choice(tokens[i], failure=failure)
        return choices

    def _tops(self, values: Tensor, ids: Tensor) -> Iterable[TopTokens]:
        """In the order of `asked`. One choice may ask for many more than the others, which then pay only for theirs."""
        nums = [num for _, num in self._asked]
        if values.shape[1] <= MOST_PAIRS:
            rows = zip(nums, ids.tolist(), values.tolist(), strict=True)
            return [tuple(zip(own_ids, own, strict=True))[:num] for num, own_ids, own in rows]
        return [
            top_tokens(
                array.array("I", own_ids[:num].astype(np.uint32).tobytes()), array.array("f", own[:num].tobytes())
            )
            for num, own_ids, own in zip(nums, ids.numpy(), values.numpy(), strict=True)
        ]
