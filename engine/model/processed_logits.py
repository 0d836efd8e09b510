"""Runs the logits processors of a step's choices, and records failures."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.logits_processor import LogitsProcessorChain, ProcessorFailed
from engine.model.upload import download

NO_TOKEN = "logits_processors left no token that could be chosen"


@dataclass(frozen=True, slots=True)
class ToProcess:
    """A choice whose logits are to be processed, and the tokens before it."""

    choice: int
    chain: LogitsProcessorChain
    prompt_tokens: Seq[int]
    output_tokens: Seq[int]


class ProcessedLogits:
    """The logits of a step's choices that have processors. Failures are known when the step is done: whether any token
    is left to choose arrives together with the tokens, so that the host need not wait for the device."""

    def __init__(self, wanted: Seq[ToProcess]) -> None:
        self._wanted = wanted
        self._failures: dict[int, str] = {}  # by choice
        self._unusable: Tensor | None = None  # [num_wanted], bool: NaN, or nothing but -inf

    def run(self, own: Tensor) -> None:
        """Change the logits in place. own: [num_choices, vocab_size], fp32."""
        flags = list[Tensor]()
        for one in self._wanted:
            row = own[one.choice]
            try:
                row.copy_(one.chain(one.prompt_tokens, one.output_tokens, row))
            except ProcessorFailed as error:
                self._failures[one.choice] = f"logits_processors: {error}"
            flags.append(row.isnan().any() | row.isneginf().all())
            row.nan_to_num_(nan=0.0, posinf=torch.finfo(row.dtype).max, neginf=-torch.inf)  # some token must be chosen
        self._unusable = torch.stack(flags)

    def to_host(self) -> None:
        """Start the copy to the host, on the current stream."""
        if self._unusable is not None:
            self._unusable = download(self._unusable)

    def failed(self) -> dict[int, str]:
        """The choices that failed, with the reasons. The caller must make sure that the copy of `to_host` is done."""
        unusable = self._unusable.tolist() if self._unusable is not None else []
        wanted = [one.choice for one in self._wanted]
        return {choice: NO_TOKEN for choice, is_bad in zip(wanted, unusable, strict=True) if is_bad} | self._failures
