"""Decoder layers whose residual additions are fused into the norms after them.

The residual is kept outside of the layers: a layer receives what the previous one adds to it, and returns what it adds
itself. The next norm's kernel makes the addition, in place. Two forms are known:

- pre-norm (Llama): h += attention(norm1(h)); h += mlp(norm2(h))
- sandwich (Gemma 2): h += norm2(attention(norm1(h))); h += norm4(mlp(norm3(h)))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.model.fast.norms import norm_forward
from engine.model.fast.patches import Target
from engine.model.fast.tally import Tally
from engine.model.linear_method import method_of
from engine.model.parallel.stages import StandIn
from engine.model.tolerance import close

_PRE_NORM = ("input_layernorm", "post_attention_layernorm")
_SANDWICH = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
Forward = Callable[..., Any]


@dataclass(slots=True)
class _Stream:
    """The residual, [1, num_tokens, hidden_size], while a forward runs."""

    residual: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Parts:
    """A layer's computations, its norms in the order in which they run. mlp_in_tuple: the MLP's output is the first
    item of a tuple."""

    norms: list[Callable[..., Tensor]]
    attention: Forward
    mlp: Forward
    mlp_in_tuple: bool


def fuse_residuals(target: Target, tally: Tally) -> None:
    """All decoder layers and the final norm after them, or none."""
    chain = _chain(target)
    if chain is None:
        return
    layers, attentions, final = chain
    stream = _Stream()
    forwards = []
    for index, (layer, attention) in enumerate(zip(layers, attentions, strict=True)):
        parts = _parts(target, layer, attention)
        if parts is None or not (final in target.norms or isinstance(final, StandIn)):
            tally.add(f"layer {index}", "adds to the residual in another way")
            continue
        forwards.append(_layer_forward(stream, parts, first=index == 0))
        tally.add(f"layer {index}", None)
    if tally.refused:
        tally.refused, tally.fused = [*tally.refused, *[("others", "all layers or none")] * tally.fused], 0
        return
    for layer, forward in zip(layers, forwards, strict=True):
        target.patches.set_forward(layer, forward)
    add = torch.Tensor.add if isinstance(final, StandIn) else norm_forward(final, target.norms[final])
    target.patches.set_forward(final, _final_forward(stream, add))


def _chain(target: Target) -> tuple[list[nn.Module], list[nn.Module], nn.Module] | None:
    """The decoder layers that this stage holds, their attention modules, and what follows: the norm, or what stands in
    for the next stage's first layer."""
    for module in target.model.modules():
        layers = getattr(module, "layers", None)
        final = getattr(module, "norm", None)
        if not isinstance(layers, nn.ModuleList) or not isinstance(final, nn.Module):
            continue
        wanted = set(target.layers)
        attentions = [child for layer in layers for child in layer.children() if child in wanted]
        held = [layer for layer in layers if not isinstance(layer, StandIn)]
        if attentions == target.layers and len(held) == len(attentions):
            after = list(layers).index(held[-1]) + 1
            return held, attentions, layers[after] if after < len(layers) else final
    return None


def _parts(target: Target, layer: nn.Module, attention: nn.Module) -> _Parts | None:
    mlp = getattr(layer, "mlp", None)
    names = _SANDWICH if hasattr(layer, _SANDWICH[-1]) else _PRE_NORM
    norms: list[Any] = [getattr(layer, name, None) for name in names]
    if not isinstance(mlp, nn.Module) or any(norm not in target.norms for norm in norms):
        return None
    inputs = {0: _input_dtype(attention), len(norms) // 2: _input_dtype(mlp)}
    forwards = [norm_forward(norm, target.norms[norm], inputs.get(place)) for place, norm in enumerate(norms)]
    for in_tuple in (False, True):
        if _agrees(target, layer, attention, mlp, _Parts(forwards, _fake_attention, _fake_mlp(in_tuple), in_tuple)):
            return _Parts(forwards, attention.forward, mlp.forward, in_tuple)
    return None


def _input_dtype(module: nn.Module) -> torch.dtype | None:
    """The type in which a module's first products want their input: that of q, k and v, or of gate and up."""
    names = ("q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj")
    methods = [method for name in names if (method := method_of(getattr(module, name, None))) is not None]
    dtypes = {method.input_dtype for method in methods}
    return dtypes.pop() if len(dtypes) == 1 else None


def _agrees(target: Target, layer: nn.Module, attention: nn.Module, mlp: nn.Module, fakes: _Parts) -> bool:
    """Whether the layer's own forward, with cheap fakes for attention and MLP, agrees with the form."""
    x = target.inputs(target.config.hidden_size)
    residual = x.flip(-1)
    mark = target.patches.mark()
    target.patches.set_forward(attention, fakes.attention)
    target.patches.set_forward(mlp, fakes.mlp)
    try:
        expected = layer(residual + x, attention_mask=None, position_ids=None, position_embeddings=None)
    except (TypeError, ValueError, AttributeError):
        return False
    finally:
        target.patches.back_to(mark)
    stream = _Stream(residual.clone())
    added = _layer_forward(stream, fakes, first=False)(x)
    return isinstance(expected, Tensor) and close(stream.residual + added, expected)


def _fake_attention(hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
    return hidden_states.roll(1, -1) * 0.5, None


def _fake_mlp(in_tuple: bool) -> Forward:
    def forward(x: Tensor) -> Any:
        result = x.roll(3, -1) * 0.25
        return (result, None) if in_tuple else result

    return forward


def _layer_forward(stream: _Stream, parts: _Parts, first: bool) -> Forward:
    attention, mlp, in_tuple = parts.attention, parts.mlp, parts.mlp_in_tuple
    sandwich = len(parts.norms) == len(_SANDWICH)
    norm1, after_attention, norm2, after_mlp = parts.norms if sandwich else (parts.norms[0], None, parts.norms[1], None)

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


def _final_forward(stream: _Stream, add: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What follows the layers: takes what the last one adds, and adds it to the residual first."""

    def forward(hidden_states: Tensor, **_: object) -> Tensor:
        residual, stream.residual = stream.residual, None
        return add(hidden_states, residual)

    return forward
