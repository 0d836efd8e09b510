"""Placeholders for modules that another pipeline stage holds, and what a model with them has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_EMBEDDING_ROWS = 64


class MissingModule(nn.Module):
    """The placeholder of a module that another stage holds (in vLLM: PPMissingLayer): returns its input."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states


class MissingLayer(MissingModule):
    """The placeholder of a decoder layer."""


class ReceivingLayer(MissingLayer):
    """The last layer before those of the stage. hidden: what the previous stage has sent, [1, num_tokens, hidden_size];
    None, as in probes: it returns its input, which comes from MissingEmbedding."""

    hidden: Tensor | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states if self.hidden is None else self.hidden


class MissingEmbedding(MissingModule):
    """Returns random hidden states, equal for equal tokens, which are good enough for probes."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._rows = torch.randn(_EMBEDDING_ROWS, width, generator=torch.Generator().manual_seed(0)).to(dtype)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """hidden_states: token ids, here."""
        self._rows = self._rows.to(hidden_states.device)  # once: it is no parameter, which a checkpoint would have
        return self._rows[hidden_states % _EMBEDDING_ROWS]


def num_held_layers(model: PreTrainedModel) -> int:
    """How many decoder layers this stage of the model holds."""
    num_layers: int = model.config.get_text_config().num_hidden_layers
    return num_layers - sum(isinstance(module, MissingLayer) for module in model.modules())


def received_by(model: nn.Module) -> ReceivingLayer | None:
    """Where the model takes what the stage before has sent; None in the first stage."""
    return next((module for module in model.modules() if isinstance(module, ReceivingLayer)), None)
