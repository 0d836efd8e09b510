"""Decoder layers whose residual additions are fused into the norms after them (see `engine.model.fast.decoder`).

Two forms are known:

- pre-norm (Llama): h += attention(norm1(h)); h += mlp(norm2(h))
- sandwich (Gemma 2): h += norm2(attention(norm1(h))); h += norm4(mlp(norm3(h)))
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from baton_kernels.unfinished import Scales, unfinished
from engine.model.fast.decoder import Decoder, Forward, LayerParts, Stream, layer_forward
from engine.model.fast.forwards import UnpagedAttention, run_model
from engine.model.fast.norm import Norm
from engine.model.fast.tally import Tally
from engine.model.fast.target import Target
from engine.model.linear_method import method_of
from engine.model.missing_modules import MissingModule
from engine.model.tolerance import close

_PRE_NORM = ("input_layernorm", "post_attention_layernorm")
_SANDWICH = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def fuse_residuals(target: Target, tally: Tally) -> None:
    """Fuse all decoder layers and the final norm after them, or none."""
    chain = _chain(target)
    if chain is None:
        return
    layers, attentions, final = chain
    found = []
    for index, (layer, attention) in enumerate(zip(layers, attentions, strict=True)):
        parts = _parts(target, layer, attention)
        if parts is None or not (final in target.norms or isinstance(final, MissingModule)):
            tally.add(f"layer {index}", "adds to the residual in another way")
            continue
        found.append(parts)
        tally.add(f"layer {index}", None)
    if tally.refused:
        tally.refused, tally.fused = [*tally.refused, *[("others", "all layers or none")] * tally.fused], 0
        return
    final_norm = None if isinstance(final, MissingModule) else Norm(final, target.norms[final])
    target.decoder = _finished_in_norms(target, Decoder(layers, attentions, found, final, final_norm))
    target.decoder.install(target.patches)


def _finished_in_norms(target: Target, decoder: Decoder) -> Decoder:
    """The decoder with MLPs that leave their last step to the norm after them, where there is one. The given decoder,
    if a forward shows that some norm does not get the very tensor that carries what is left."""
    parts, trial = list(decoder.parts), list(decoder.parts)
    for index, (layer, own) in enumerate(zip(decoder.layers, decoder.parts, strict=True)):
        mlp = target.mlps_for_norms.get(layer.get_submodule("mlp"))
        is_followed = decoder.final_norm is not None or own.is_sandwich or index + 1 < len(parts)
        if mlp is not None and is_followed:
            alone = replace(own, mlp=mlp, mlp_in_tuple=False)
            parts[index], trial[index] = alone, replace(alone, mlp=_leaving_scales(own.mlp, own.mlp_in_tuple))
    if trial == decoder.parts:
        return decoder
    mark, logits = target.patches.mark(), list[Tensor]()
    for tried in (decoder, replace(decoder, parts=trial)):
        tried.install(target.patches)
        logits.append(run_model(target, UnpagedAttention()))
        target.patches.back_to(mark)
    return replace(decoder, parts=parts) if close(logits[1], logits[0]) else decoder


def _leaving_scales(mlp: Forward, in_tuple: bool) -> Forward:
    """A stand-in for an MLP that leaves something to the norm: scales, for any number of rows; its results are
    exact."""

    def forward(x: Tensor) -> Tensor:
        out: Tensor = mlp(x)[0] if in_tuple else mlp(x)
        rows = torch.full((out.numel() // out.shape[-1], 1), 8.0, device=out.device)
        return unfinished(out / 8, Scales(rows, torch.ones(out.shape[-1], device=out.device)))

    return forward


def _chain(target: Target) -> tuple[list[nn.Module], list[nn.Module], nn.Module] | None:
    """The decoder layers that this stage holds, their attention modules, and the module after them: the final norm, or
    the stand-in for the next stage's first layer. None: they were not found."""
    for module in target.model.modules():
        layers = getattr(module, "layers", None)
        final = getattr(module, "norm", None)
        if not isinstance(layers, nn.ModuleList) or not isinstance(final, nn.Module):
            continue
        wanted = set(target.layers)
        attentions = [child for layer in layers for child in layer.children() if child in wanted]
        held = [layer for layer in layers if not isinstance(layer, MissingModule)]
        if attentions == target.layers and len(held) == len(attentions):
            after = list(layers).index(held[-1]) + 1
            return held, attentions, layers[after] if after < len(layers) else final
    return None


def _parts(target: Target, layer: nn.Module, attention: nn.Module) -> LayerParts | None:
    mlp = getattr(layer, "mlp", None)
    names = _SANDWICH if hasattr(layer, _SANDWICH[-1]) else _PRE_NORM
    norms: list[Any] = [getattr(layer, name, None) for name in names]
    if not isinstance(mlp, nn.Module) or any(norm not in target.norms for norm in norms):
        return None
    inputs = {0: _input_dtype(attention), len(norms) // 2: _input_dtype(mlp)}
    found = [Norm(norm, target.norms[norm], inputs.get(place)) for place, norm in enumerate(norms)]
    for in_tuple in (False, True):
        if _agrees(target, layer, attention, mlp, LayerParts(found, _fake_attention, _fake_mlp(in_tuple), in_tuple)):
            return LayerParts(found, attention.forward, mlp.forward, in_tuple)
    return None


def _input_dtype(module: nn.Module) -> torch.dtype | None:
    """The dtype to which a module's first products (q, k and v, or gate and up) quantize their input; None: they do
    not, or differ."""
    names = ("q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj")
    methods = [method for name in names if (method := method_of(getattr(module, name, None))) is not None]
    dtypes = {method.input_dtype for method in methods}
    return dtypes.pop() if len(dtypes) == 1 else None


def _agrees(target: Target, layer: nn.Module, attention: nn.Module, mlp: nn.Module, fakes: LayerParts) -> bool:
    """Whether the layer's own forward agrees with ours, both with cheap fakes for attention and MLP."""
    x = target.inputs(target.config.hidden_size)
    residual = x.flip(-1)
    mark = target.patches.mark()
    target.patches.set_forward(attention, fakes.attention)
    target.patches.set_forward(mlp, fakes.mlp)
    try:
        expected = layer(residual + x, attention_mask=None, position_ids=None, position_embeddings=None)
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return False
    finally:
        target.patches.back_to(mark)
    stream = Stream(residual.clone())
    added = layer_forward(stream, fakes, first=False)(x)
    return isinstance(expected, Tensor) and close(stream.residual + added, expected)


def _fake_attention(hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
    return hidden_states.roll(1, -1) * 0.5, None


def _fake_mlp(in_tuple: bool) -> Forward:
    def forward(x: Tensor) -> Any:
        result = x.roll(3, -1) * 0.25
        return (result, None) if in_tuple else result

    return forward
