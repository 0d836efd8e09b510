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
from baton.top_tokens import MOST_PAIRS, PackedTop, TopTokens
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


@dataclass(frozen=True, slots=True)
class AskedLogprobs:
    """Logprobs of some choices of a step. asked: (choice, number of logprobs) pairs. chosen: those of the tokens chosen
    there, [num_asked]. values, ids: of the most likely tokens, [num_asked, width]; a choice gets its number of them."""

    asked: Seq[tuple[int, int]]
    chosen: Tensor
    values: Tensor
    ids: Tensor

    def to_host(self) -> AskedLogprobs:
        return AskedLogprobs(self.asked, download(self.chosen), download(self.values), download(self.ids))

    def of_choices(self) -> Iterable[tuple[int, TokenLogprobs]]:
        """For each choice, once it is on the host."""
        tops = self._few() if self.values.shape[1] <= MOST_PAIRS else self._many()
        for (choice, num), chosen, top in zip(self.asked, self.chosen.tolist(), tops, strict=True):
            yield choice, TokenLogprobs(chosen, top[:num])

    def _few(self) -> Iterable[TopTokens]:
        return (tuple(zip(*row, strict=True)) for row in zip(self.ids.tolist(), self.values.tolist(), strict=True))

    def _many(self) -> Iterable[TopTokens]:
        for ids, values in zip(self.ids.numpy(), self.values.numpy(), strict=True):
            yield PackedTop(array.array("I", ids.astype(np.uint32).tobytes()), array.array("f", values.tobytes()))


class Sampled:
    """The choices that a launched step makes. tokens: [num_choices], int32, on the device."""

    processed: ProcessedLogits | None = None

    def __init__(self, tokens: Tensor, logprobs: Seq[AskedLogprobs] = ()) -> None:
        self.tokens = tokens
        self._on_host = tokens
        self._logprobs = logprobs

    def to_host(self) -> None:
        """Start the copies to the host, on the current stream."""
        self._on_host = download(self.tokens)
        self._logprobs = [logprobs.to_host() for logprobs in self._logprobs]
        if self.processed is not None:
            self.processed.to_host()

    def choices(self) -> list[Choice]:
        """One per choice of the batch. The caller must make sure that the copies of `to_host` are done."""
        tokens: list[int] = self._on_host.tolist()
        choices = [Choice(token) for token in tokens]
        for asked in self._logprobs:
            for i, logprobs in asked.of_choices():
                choices[i] = Choice(tokens[i], logprobs)
        for i, failure in (self.processed.failed() if self.processed is not None else {}).items():
            choices[i] = Choice(tokens[i], failure=failure)
        return choices
