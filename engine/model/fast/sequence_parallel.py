"""Decoder layers whose rows are divided among ranks, and computed in pieces: `engine.model.parallel.sequence_parallel`.

    norm1, q, k, v     of each piece, when its rows have come from their owners
    attention          of all rows
    o                  of each piece; the parts travel to the owners, who norm them
    MLP                of each piece, when its rows have come; the parts travel likewise

A block of experts computes all rows at once: each piece would read the weights of most experts again, and the block
knows by the rows' numbers which are padding. Only steps of many rows are divided, and only if norms make all sums of
the layers (`engine.model.fast.sums`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from baton_kernels.reduce_rms_norm import Parts, reduce_rms_norm
from engine.model.fast.decoder import Decoder, Forward, LayerParts, Stream
from engine.model.fast.forwards import UnpagedAttention, run_model
from engine.model.fast.norm import Norm, norm_forward
from engine.model.fast.tally import Tally
from engine.model.fast.target import FusedQkv, Target
from engine.model.linear_method import Product, method_of
from engine.model.parallel.experts import BlockSum
from engine.model.parallel.group import NormSums
from engine.model.parallel.layers import RowParallelLinear
from engine.model.parallel.sequence_parallel import SequenceParallel
from engine.model.tolerance import close

log = logging.getLogger(__name__)

NormOwn = Callable[[Tensor, Parts, slice, Tensor], None]
"""`OwnRows` after the residual of all rows, [num_rows, width]."""


def divide_rows(target: Target, tally: Tally) -> None:
    """Divide the rows of all layers among the ranks that hold parts of them, or none."""
    decoder, summed = target.decoder, target.summed
    if decoder is None or decoder.final_norm is None or summed is None:
        return
    try:
        rows = summed.ranks.share_rows(target.config.hidden_size, target.model.dtype)
    except RuntimeError as error:
        log.warning("rows of long steps are not divided: %s", error)
        rows = None
    if not summed.ranks.minimum(int(rows is not None)) or rows is None:
        return
    for module in summed.outputs:
        method = method_of(module)
        assert isinstance(method, RowParallelLinear)
        target.patches.set_forward(module, _in_pieces(rows, module.forward, method))
    lazy = _lazy_attentions(target, decoder)
    norms = [parts.norms for parts in decoder.parts] + [[decoder.final_norm]]
    for index, (layer, parts) in enumerate(zip(decoder.layers, decoder.parts, strict=True)):
        fused = lazy.get(decoder.attentions[index])
        if fused is not None:
            _replace_product(target, fused, _as_rows_come(rows, fused))
        between, after = (parts.norms[1:3], parts.norms[3:]) if parts.is_sandwich else (parts.norms[1:], [])
        forward = _layer_forward(
            decoder.stream,
            rows,
            parts,
            norm_own(between),
            norm_own([*after, norms[index + 1][0]]),
            takes_rows=fused is not None,
            mlp_in_pieces=BlockSum.of(layer.get_submodule("mlp")) is None,
            plain=layer.forward,
        )
        if index == 0:
            forward = _first_forward(decoder.stream, rows, summed.ranks, parts, forward)
        target.patches.set_forward(layer, forward)
        tally.add(f"layer {index}", None)
    target.patches.set_forward(decoder.final, _final_forward(decoder.stream, rows, decoder.final.forward))


def norm_own(norms: Sequence[Norm]) -> NormOwn:
    """What an owner does with the sums of its rows: the norm that adds them to the residual, or one norm before it."""
    first = norms[0]
    weight, kind = first.module.weight, first.kind
    assert isinstance(weight, Tensor)
    second = norm_forward(norms[1]._replace(quantize=None, sums=None)) if len(norms) > 1 else None

    def norm(residual: Tensor, parts: Parts, rows: slice, out: Tensor) -> None:
        own = residual[rows]
        reduce_rms_norm(
            parts,
            weight,
            kind.eps,
            out,
            residual=own if second is None else None,
            weight_offset=kind.weight_offset,
            round_once=kind.round_once,
        )
        if second is not None:
            out.copy_(second(out, own))

    return norm


def _layer_forward(
    stream: Stream,
    rows: SequenceParallel,
    parts: LayerParts,
    between: NormOwn,
    after: NormOwn,
    *,
    takes_rows: bool,
    mlp_in_pieces: bool,
    plain: Forward,
) -> Forward:
    """takes_rows: the attention takes the pieces of its input itself. plain: for steps that are not divided."""
    attention, mlp, in_tuple = parts.attention, parts.mlp, parts.mlp_in_tuple

    def compute_mlp(x: Tensor) -> Tensor:
        result = mlp(x)
        part: Tensor = result[0] if in_tuple else result
        return part

    def forward(hidden_states: Tensor, **kwargs: Any) -> Tensor:
        if not rows.active:
            result: Tensor = plain(hidden_states, **kwargs)
            return result
        assert stream.residual is not None
        residual = stream.residual[0]
        if hidden_states is rows.x and not takes_rows:
            rows.take_all()
        rows.then(partial(between, residual))
        attention(hidden_states=hidden_states, **kwargs)
        rows.then(partial(after, residual))
        whole = None if mlp_in_pieces else compute_mlp(rows.take_all())
        for index, piece in enumerate(rows.pieces):
            rows.send(index, compute_mlp(rows.take(index)) if whole is None else whole[..., piece, :])
        return rows.x

    return forward


def _first_forward(
    stream: Stream, rows: SequenceParallel, ranks: NormSums, parts: LayerParts, divided: Forward
) -> Forward:
    """The first layer's: decides whether the step is divided. All ranks have all rows of its input."""
    norm1 = norm_forward(parts.norms[0]._replace(quantize=None))

    def forward(hidden_states: Tensor, **kwargs: Any) -> Tensor:
        rows.active = False  # a step that failed did not end
        num_rows, width = hidden_states.shape[-2:]
        if rows.takes(num_rows) and not ranks.norms_sum(num_rows, width * hidden_states.itemsize):
            rows.begin(num_rows)
            stream.residual, hidden_states = hidden_states, norm1(hidden_states)
        result: Tensor = divided(hidden_states, **kwargs)
        return result

    return forward


def _final_forward(stream: Stream, rows: SequenceParallel, plain: Forward) -> Forward:
    def forward(hidden_states: Tensor, **kwargs: Any) -> Tensor:
        if rows.active:
            stream.residual = None
            return rows.end()
        result: Tensor = plain(hidden_states, **kwargs)
        return result

    return forward


def _in_pieces(rows: SequenceParallel, whole: Forward, method: RowParallelLinear) -> Product:
    """The product at the end of attention."""
    into, in_features, out_features = method.own.make_product_into(), method.in_features, method.out_features

    def product(x: Tensor) -> Tensor:
        if not rows.active:
            result: Tensor = whole(x)
            return result
        out = x.new_empty(*x.shape[:-1], out_features)
        x, parts = x.reshape(-1, in_features), out.view(-1, out_features)
        for index, piece in enumerate(rows.pieces):
            into(x[piece], parts[piece])
            rows.send(index, parts[piece])
        return out

    return product


def _as_rows_come(rows: SequenceParallel, fused: FusedQkv) -> Product:
    """The product at the beginning of attention."""
    whole, into, out_features = fused.product, fused.method.make_product_into(), fused.method.out_features

    def product(x: Tensor) -> Tensor:
        if not (rows.active and x is rows.x):
            return whole(x)
        out = x.new_empty(*x.shape[:-1], out_features)
        for index, piece in enumerate(rows.pieces):
            into(rows.take(index)[0], out[0, piece])
        return out

    return product


def _lazy_attentions(target: Target, decoder: Decoder) -> dict[nn.Module, FusedQkv]:
    """The attention modules that read their input in the product for q, k and v alone, as a forward shows."""
    found: dict[nn.Module, FusedQkv] = {}
    mark = target.patches.mark()

    def watched(module: nn.Module, fused: FusedQkv, forward: Forward) -> Forward:
        def watch(*, hidden_states: Tensor, **named: Any) -> Any:
            expected = forward(hidden_states=hidden_states, **named)
            own, unread = fused.product, torch.full_like(hidden_states, torch.nan)
            fused.product = lambda x: own(hidden_states if x is unread else x)
            try:
                found_result = forward(hidden_states=unread, **named)
            finally:
                fused.product = own
            if close(found_result[0], expected[0]):
                found[module] = fused
            return expected

        return watch

    parts = list(decoder.parts)
    for index, module in enumerate(decoder.attentions):
        if (fused := target.fused_qkv.get(module)) is not None:
            parts[index] = replace(parts[index], attention=watched(module, fused, parts[index].attention))
    replace(decoder, parts=parts).install(target.patches)
    run_model(target, UnpagedAttention())
    target.patches.back_to(mark)
    return found


def _replace_product(target: Target, fused: FusedQkv, product: Product) -> None:
    before, fused.product = fused.product, product

    def restore() -> None:
        fused.product = before

    target.patches.undo.append(restore)
