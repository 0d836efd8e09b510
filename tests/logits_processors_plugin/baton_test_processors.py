"""A package that offers logits processors, as installed ones do: by its metadata."""

from __future__ import annotations

import torch
from torch import Tensor


class Forced:
    """The output is these tokens, again and again; all other logits are -inf."""

    def __init__(self, token_ids: list[int], logit: float = 0.0) -> None:
        self._token_ids = token_ids
        self._logit = logit

    def __call__(self, output_token_ids: list[int], logits: Tensor) -> Tensor:
        forced = torch.full_like(logits, -torch.inf)
        forced[self._token_ids[len(output_token_ids) % len(self._token_ids)]] = self._logit
        return forced


class AfterPrompt:
    """The output repeats the prompt."""

    def __call__(self, prompt_token_ids: list[int], output_token_ids: list[int], logits: Tensor) -> Tensor:
        logits[prompt_token_ids[len(output_token_ids) % len(prompt_token_ids)]] = 1e4
        return logits


class BrokenAt:
    """In some way, once there are so many tokens."""

    def __init__(self, index: int, how: str) -> None:
        self._index = index
        self._how = how

    def __call__(self, output_token_ids: list[int], logits: Tensor) -> object:
        if len(output_token_ids) < self._index:
            return logits
        if self._how == "raises":
            raise KeyError("no such token")
        return {
            "shape": logits[:-1],
            "type": None,
            "nan": logits * torch.nan,
            "nothing": torch.full_like(logits, -torch.inf),
        }[self._how]
