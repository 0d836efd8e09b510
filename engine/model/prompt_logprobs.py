"""Logprobs of prompts: the logprobs that the model gives each token of a prompt.

A step normally computes only the logits that choose tokens. For a prompt's own tokens, the hidden states of its chunk
go through the model's head in slices, so that [rows, vocab_size] stays small however long the chunk is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from baton.prompt_logprobs import PromptLogprobs, most_piece_tokens
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
    """The prompt logprobs that the chunks ask for, as pieces that take little memory: their logits, and what is told of
    them. chunks: in the order of the batch."""
    most_rows = max(1, min(MAX_ROWS, _MAX_ELEMENTS // vocab_size))
    found: list[ScoredPiece] = []
    first = 0
    for chunk in chunks:
        if (num_top := chunk.sequence.num_prompt_logprobs) is not None:
            positions = chunk.scored_positions
            rows = min(most_rows, most_piece_tokens(min(num_top, vocab_size)))
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
        self._decoder: nn.Module = model
        self._given = _Given()

    @contextmanager
    def kept(self) -> Iterator[list[Tensor]]:
        """Within the context, the list holds the hidden states of the last forward, [num_tokens, hidden_size]. Raises
        UnsupportedModel if the model has no separate decoder."""
        base: Any = self._model.base_model
        if base is self._model:
            raise UnsupportedModel(f"{type(self._model).__name__} has no decoder that is apart from its head")
        kept: list[Tensor] = []

        def keep(decoder: nn.Module, _: object, output: Any) -> None:
            # The model may call a module within its base (OPT). Where it calls both, the outer one ends last.
            hidden = output.last_hidden_state
            self._decoder, kept[:] = decoder, [hidden[0]]
            self._given.output = replace(output, last_hidden_state=hidden.new_empty(0))

        hooks = [decoder.register_forward_hook(keep) for decoder in {base, base.get_decoder()}]
        try:
            yield kept
        finally:
            for hook in hooks:
                hook.remove()

    def head(self, arguments: Mapping[str, Any]) -> Head:
        """The model's head. arguments: those of the forward that returned the hidden states, which were kept."""
        decoder = self._decoder
        path = next(name for name, module in self._model.named_modules() if module is decoder)
        owner, _, name = path.rpartition(".")
        parent = self._model.get_submodule(owner)

        def run(hidden: Tensor) -> Tensor:
            self._given.hidden = hidden[None]
            setattr(parent, name, self._given)
            try:
                logits: Tensor = self._model(**{**arguments, "logits_to_keep": 0}).logits[0]
            finally:
                setattr(parent, name, decoder)
                self._given.hidden = None
            return logits

        return run


class _Given(nn.Module):
    """Stands in for a decoder. output: its own, of which the model may read more than hidden states (GPT-2, Gemma
    4)."""

    hidden: Tensor | None = None
    output: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return replace(self.output, last_hidden_state=self.hidden)
