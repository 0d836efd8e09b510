"""Logprobs of prompts: the logprobs that the model gives each token of a prompt.

A step normally computes only the logits that choose tokens. For a prompt's own tokens, the hidden states of its chunk
go through the model's head in slices, so that [rows, vocab_size] stays small however long the chunk is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from baton.prompt_logprobs import MAX_PIECE_TOKENS, PromptLogprobs
from engine.model.errors import UnsupportedModel
from engine.model.upload import download, upload
from engine.sequence import Sequence
from engine.step import Chunk

MAX_ROWS = 256
_MAX_ELEMENTS = 2**24
"""The most logits of a slice: 64 MiB in fp32."""

Head = Callable[[Tensor], Tensor]
"""Maps hidden states [rows, hidden_size] to logits [rows, vocab_size]."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Logprobs of consecutive tokens of a sequence's prompt, on their way to the host. own: [rows] fp32. ranks: [rows]
    int32. values, ids: [rows, num_top], fp32 and int32."""

    sequence: Sequence
    first_index: int
    own: Tensor
    ranks: Tensor
    values: Tensor
    ids: Tensor

    def piece(self) -> PromptLogprobs:
        """The logprobs on the host. The caller must make sure that the copies to the host are done."""
        own, ranks, values, ids = (
            np.ascontiguousarray(tensor.numpy(), dtype).tobytes()
            for tensor, dtype in ((self.own, "<f4"), (self.ranks, "<u4"), (self.values, "<f4"), (self.ids, "<u4"))
        )
        return PromptLogprobs(self.first_index, self.ids.shape[1], own, ranks, ids, values)


@dataclass(frozen=True, slots=True)
class ScoredPiece:
    """Consecutive tokens of a batch whose logits give the logprobs of the prompt tokens after them. first_index: the
    index of the first logprob in the prompt. first: the index of the first token in the batch."""

    sequence: Sequence
    first_index: int
    first: int
    count: int

    def score(self, logits: Tensor) -> Scored:
        """Start to compute the logprobs from the logits of these tokens, [count, vocab_size]."""
        return _score(self.sequence, self.first_index, logits, self.count)


def pieces(chunks: Seq[Chunk], vocab_size: int) -> list[ScoredPiece]:
    """The prompt logprobs that the chunks ask for, as pieces whose logits take little memory. chunks: in the order of
    the batch."""
    rows = max(1, min(MAX_ROWS, MAX_PIECE_TOKENS, _MAX_ELEMENTS // vocab_size))
    found: list[ScoredPiece] = []
    first = 0
    for chunk in chunks:
        if chunk.sequence.num_prompt_logprobs is not None:
            positions = chunk.scored_positions
            for start in range(positions.start, positions.stop, rows):
                count = min(rows, positions.stop - start)
                found.append(ScoredPiece(chunk.sequence, start + 1, first + start - chunk.start, count))
        first += chunk.length
    return found


def _score(sequence: Sequence, first_index: int, logits: Tensor, count: int) -> Scored:
    logprobs = logits.float().log_softmax(dim=-1)
    tokens = np.asarray(sequence.prompt_tokens[first_index : first_index + count], np.int64)
    own = logprobs.gather(1, upload(tokens, logits.device)[:, None])
    ranks = (logprobs >= own).sum(dim=-1, dtype=torch.int32)
    values, ids = logprobs.topk(min(sequence.num_prompt_logprobs or 0, logits.shape[1]), dim=-1)
    arrays = (download(tensor) for tensor in (own[:, 0], ranks, values, ids.int()))
    return Scored(sequence, first_index, *arrays)


class HiddenStates:
    """The seam between a model's decoder and its head: keeps the hidden states of a forward, and runs the head alone.

    The model's own forward runs the head, with a stand-in for the decoder that returns given hidden states. So the
    model's changes to its logits (scales, caps) apply here, too. All calls belong to the thread that runs the model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._name = model.base_model_prefix
        self._given = _Given()

    @contextmanager
    def kept(self) -> Iterator[list[Tensor]]:
        """Within the context, forwards append their hidden states, [num_tokens, hidden_size], to the list. Raises
        UnsupportedModel if the model has no separate decoder."""
        decoder = self._model.base_model
        if decoder is self._model:
            raise UnsupportedModel(f"{type(self._model).__name__} has no decoder that is apart from its head")
        kept: list[Tensor] = []
        hook = decoder.register_forward_hook(lambda _, inputs, output: kept.append(output[0][0]))
        try:
            yield kept
        finally:
            hook.remove()

    def head(self, arguments: Mapping[str, Any]) -> Head:
        """The model's head. arguments: those of the forward that returned the hidden states."""

        def run(hidden: Tensor) -> Tensor:
            decoder, self._given.hidden = self._model.base_model, hidden[None]
            setattr(self._model, self._name, self._given)
            try:
                logits: Tensor = self._model(**{**arguments, "logits_to_keep": 0}).logits[0]
            finally:
                setattr(self._model, self._name, decoder)
                self._given.hidden = None
            return logits

        return run


class _Given(nn.Module):
    """Stands in for a decoder. Mixtures of experts read their routers' logits from its output; there are none."""

    hidden: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=self.hidden)
