"""Decoder layers that keep the residual outside of the layers: their parts, and their forwards.

A layer takes what the previous layer adds to the residual, and returns what it adds itself. The kernel of the next norm
does the addition, in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from engine.model.fast.norm import Norm, norm_forward
from engine.model.fast.patches import Patches

NORMS_OF_SANDWICH = 4
Forward = Callable[..., Any]


@dataclass(slots=True)
class Stream:
    """The residual, [1, num_tokens, hidden_size], while a forward runs."""

    residual: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The parts of a layer. norms: in the order in which they run. mlp_in_tuple: the MLP's output is the first item of
    a tuple."""

    norms: list[Norm]
    attention: Forward
    mlp: Forward
    mlp_in_tuple: bool

    @property
    def is_sandwich(self) -> bool:
        return len(self.norms) == NORMS_OF_SANDWICH


@dataclass(frozen=True, slots=True)
class Decoder:
    """The layers of a stage, each with its attention module and its parts. final: the module after them, which is the
    final norm or the stand-in for the next stage's first layer. final_norm: None for a stand-in."""

    layers: list[nn.Module]
    attentions: list[nn.Module]
    parts: list[LayerParts]
    final: nn.Module
    final_norm: Norm | None
    stream: Stream = field(default_factory=Stream)

    def install(self, patches: Patches) -> None:
        """Set the forwards of the layers and of the module after them."""
        for index, (layer, parts) in enumerate(zip(self.layers, self.parts, strict=True)):
            patches.set_forward(layer, layer_forward(self.stream, parts, first=index == 0))
        add = Tensor.add if self.final_norm is None else norm_forward(self.final_norm)
        patches.set_forward(self.final, _final_forward(self.stream, add))


def layer_forward(stream: Stream, parts: LayerParts, first: bool) -> Forward:
    attention, mlp, in_tuple = parts.attention, parts.mlp, parts.mlp_in_tuple
    norms = [norm_forward(norm) for norm in parts.norms]
    norm1, after_attention, norm2, after_mlp = norms if parts.is_sandwich else (norms[0], None, norms[1], None)

    def forward(hidden_states: Tensor, **kwargs: Any) -> Tensor:
        if first:
            # Nothing else uses the embedding's output: the norms may add to it in place.
            stream.residual = residual = hidden_states
            x = norm1(hidden_states)
        else:
            residual = stream.residual  # type: ignore[assignment]
            x = norm1(hidden_states, residual)
        x, _ = attention(hidden_states=x, **kwargs)
        if after_attention is not None:
            x = after_attention(x)
        x = mlp(norm2(x, residual))
        if in_tuple:
            x = x[0]
        return x if after_mlp is None else after_mlp(x)

    return forward


def _final_forward(stream: Stream, add: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A forward for the module after the layers. It takes what the last layer adds, and adds that to the residual
    first."""

    def forward(hidden_states: Tensor, **_: object) -> Tensor:
        residual, stream.residual = stream.residual, None
        return add(hidden_states, residual)

    return forward
