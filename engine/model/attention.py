"""Paged attention under Hugging Face's model classes, through transformers' AttentionInterface.

A batch is one row, [1, num_tokens], whatever sequences are in it. The implementation name `baton_paged` makes every
attention module call `forward` here, and, being unknown to transformers' mask builders, makes the model build no mask.
The module's own `AttentionSite` handles the call, so models of several nodes in one process do not interfere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from baton_kernels.kv_write import HeadNorm, kv_write, rope_kv_write
from baton_kernels.paged_attention import PagedBatch, paged_attention
from engine.model.kv_pool import KvPool
from engine.model.layer_marks import SeesLayers

IMPLEMENTATION = "baton_paged"
OWN_ATTENTION = "its class has attention functions of its own"
"""Why a model class is refused that does not call transformers' AttentionInterface."""
_SITE = "baton_attention_site"
_ROTARY = "baton_fused_rotary"


@dataclass(slots=True)
class AttentionCall:
    """One attention call of a model. query: [num_tokens, num_heads, head_dim]; key, value: with num_kv_heads. mask: as
    the model built it."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    sliding_window: int | None
    softcap: float | None
    sinks: Tensor | None
    mask: Tensor | None = None


class AttentionSite(Protocol):
    """Handles the calls of one attention module."""

    def attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        """The attention's output, [num_tokens, num_heads, head_dim]."""


def forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """transformers' signature. query, key, value: [1, heads, num_tokens, head_dim], usually transposed views."""
    site: AttentionSite = module.__dict__[_SITE]
    call = AttentionCall(
        query=query[0].transpose(0, 1),
        key=key[0].transpose(0, 1),
        value=value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        mask=attention_mask,
    )
    return site.attend(module, call)[None], None


AttentionInterface.register(IMPLEMENTATION, forward)


@dataclass(slots=True)
class Angles:
    """The step's cos and sin, [num_tokens, rotary_dim] each, as `rope_kv_write` takes them. The first layer that gets
    `source` computes them; all later layers use them."""

    source: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None


@dataclass(frozen=True, slots=True)
class FusedRotary:
    """For a layer that passes on query and key unrotated: the KV write rotates them. See `rope_kv_write`."""

    angles: Angles
    interleaved: bool
    norm: HeadNorm | None

    @staticmethod
    def of(module: nn.Module) -> FusedRotary | None:
        found: FusedRotary | None = module.__dict__.get(_ROTARY)
        return found

    @staticmethod
    def set(module: nn.Module, rotary: FusedRotary | None) -> None:
        """Takes effect with the next `attach`."""
        module.__dict__[_ROTARY] = rotary


@dataclass(slots=True)
class StepContext:
    """The batch that the model is computing, as the layers of one KV group see it; set before each forward.
    row_slot_mapping: the slot mapping of the rows that experts compute, which are those of all data parallel nodes;
    None: no row is padding."""

    batch: PagedBatch | None = None
    slot_mapping: Tensor | None = None
    row_slot_mapping: Tensor | None = None
    marks: SeesLayers | None = None


@dataclass(frozen=True, slots=True)
class LayerSite:
    """Attention over one layer's part of the pool. sliding_window: what the probe has found; the module may not say
    it. complete: the layer whose KV is complete on all ranks when this one's is written on this rank; -1: none is."""

    step: StepContext
    key_cache: Tensor
    value_cache: Tensor
    sliding_window: int | None
    rotary: FusedRotary | None = None
    complete: int = 0

    def attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        batch, slots, rotary = self.step.batch, self.step.slot_mapping, self.rotary
        assert batch is not None
        assert slots is not None
        query, key, value = call.query, call.key, call.value
        if rotary is None:
            kv_write(key, value, self.key_cache, self.value_cache, slots)
        else:
            cos, sin = rotary.angles.cos, rotary.angles.sin
            assert cos is not None
            assert sin is not None
            rope_kv_write(
                query,
                key,
                value,
                cos,
                sin,
                self.key_cache,
                self.value_cache,
                slots,
                interleaved=rotary.interleaved,
                norm=rotary.norm,
            )
        if self.step.marks is not None:
            self.step.marks.written(self.complete)
        return paged_attention(
            query,
            self.key_cache,
            self.value_cache,
            batch,
            scale=call.scale,
            sliding_window=self.sliding_window,
            softcap=call.softcap,
            sinks=call.sinks,
            key=key,
            value=value,
        )


def attach(layers: list[nn.Module], pool: KvPool, num_ranks: int = 1) -> list[StepContext]:
    """Bind the attention modules, in the order of their layers, to the pool; after `fast.apply`, if that is used.
    num_ranks: among which each layer is divided. Returns the context of each KV group."""
    steps = [StepContext() for _ in range(pool.num_groups)]
    behind = int(num_ranks > 1)  # a rank gets to the next layer when it has the sum of what all ranks attended to
    for index, module in enumerate(layers):
        keys, values = pool.layer(index)
        step = steps[pool.group_of(index)]
        window = pool.layers[index].sliding_window
        bind(module, LayerSite(step, keys, values, window, FusedRotary.of(module), index - behind))
    return steps


def row_slot_mapping_of(layer: nn.Module, x: Tensor) -> Tensor | None:
    """The current step's `StepContext.row_slot_mapping`, [rows] int64, 0 for padding rows. None on a CPU, and if x,
    [rows, width], has another number of rows. layer: an attention module."""
    site = layer.__dict__.get(_SITE)
    slots = site.step.row_slot_mapping if isinstance(site, LayerSite) and x.is_cuda else None
    return slots if slots is not None and slots.shape[0] == x.shape[0] else None


def bind(module: nn.Module, site: AttentionSite | None) -> None:
    """Set the site that handles the module's attention calls; None: nothing handles them."""
    if site is None:
        module.__dict__.pop(_SITE, None)
    else:
        module.__dict__[_SITE] = site


def attend_within(call: AttentionCall) -> Tensor:
    """Attention among the tokens of the call, which form one prompt: [num_tokens, num_heads, head_dim]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (call.query, call.key, call.value))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=call.scale, enable_gqa=True)
    return out[0].transpose(0, 1)
