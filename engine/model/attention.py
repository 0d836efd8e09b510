"""Paged attention under Hugging Face's model classes, through transformers' AttentionInterface.

A batch is one row, [1, num_tokens], whatever sequences are in it. The implementation name `baton_paged` makes every
attention module call `forward` here, and, being unknown to transformers' mask builders, makes the model build no mask.
A probe uses another name, so that masks tell their windows. The module's own `AttentionSite` handles the call, so
models of several nodes in one process do not interfere.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from baton.layout import LayerKv
from baton_kernels.kv_write import HeadNorm, kv_write, rope_kv_write
from baton_kernels.paged_attention import PagedBatch, paged_attention
from engine.model import rope
from engine.model.errors import UnsupportedModel
from engine.model.kv_pool import KvPool, require_served
from engine.model.layer_marks import SeesLayers
from engine.model.parallel.stages import num_held_layers, received_by
from engine.model.tolerance import Tolerance, close, rounding

IMPLEMENTATION = "baton_paged"
_PROBED = "baton_probed"
_SITE = "baton_attention_site"
_ROTARY = "baton_fused_rotary"
_FEW = 4
"""Tokens of a probe."""
_NEEDS_MORE = "its later pipeline stages need more than hidden states"


@dataclass(slots=True)
class AttentionCall:
    """One attention call of a model. query: [num_tokens, num_heads, head_dim]; key, value: with num_kv_heads. mask: in
    a probe, what `_window_of_mask` made."""

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


def _window_of_mask(*, local_size: int | None = None, **_: object) -> Tensor:
    """In place of a mask: the window that it would have, [1, 1, 1, 1]; 0: none."""
    return torch.full((1, 1, 1, 1), local_size or 0)


AttentionInterface.register(IMPLEMENTATION, forward)
AttentionInterface.register(_PROBED, forward)
AttentionMaskInterface.register(_PROBED, _window_of_mask)


# ---- while serving ----


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
    """Attention over one layer's part of the pool. complete: the layer whose KV is complete on all ranks when this
    one's is written on this rank; -1: none is."""

    step: StepContext
    key_cache: Tensor
    value_cache: Tensor
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
            sliding_window=call.sliding_window,
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
        bind(module, LayerSite(step, keys, values, FusedRotary.of(module), index - behind))
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


# ---- at load ----


@dataclass(frozen=True, slots=True)
class Probe:
    """What a first forward showed: the attention modules in the order in which they run, and the KV that each keeps.
    groups: the KV groups of these layers, see KvPool; empty: one group."""

    layers: list[nn.Module]
    kv: tuple[LayerKv, ...]
    groups: tuple[tuple[int, ...], ...] = ()

    def block_bytes(self, block_size: int) -> int:
        """The size of a block in this rank's pool."""
        num_layers = max(map(len, self.groups), default=len(self.kv))
        return num_layers * self.kv[0].num_kv_heads * self.kv[0].head_bytes(block_size)


class _ProbeSite:
    """Attends within the probe's few tokens, and records the calls."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.calls: list[tuple[nn.Module, LayerKv]] = []
        self.masks: list[Tensor | None] = []
        self._dtype = str(dtype).removeprefix("torch.")

    def attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        num_kv_heads, head_dim_k = call.key.shape[1:]
        kept = LayerKv(num_kv_heads, head_dim_k, call.value.shape[-1], self._dtype, call.sliding_window)
        self.calls.append((module, kept))
        self.masks.append(call.mask)
        return attend_within(call)


class _AloneSite:
    """Attends from each token to itself alone; notes whether all queries and keys are equal, which is stricter for the
    first layer, where rounding has not added up."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.are_equal = True
        rounded = rounding(dtype)
        self._bound, self._next = rounded, Tolerance(rounded.logits, rounded.logits)

    def attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        for x in (call.query.nan_to_num(), call.key.nan_to_num()):  # an overflow says nothing of positions
            self.are_equal &= close(x, x[:1].expand_as(x), self._bound)
        self._bound = self._next
        return call.value.repeat_interleave(call.query.shape[1] // call.value.shape[1], dim=1)


def attend_within(call: AttentionCall) -> Tensor:
    """Attention among the tokens of the call, which form one prompt: [num_tokens, num_heads, head_dim]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (call.query, call.key, call.value))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=call.scale, enable_gqa=True)
    return out[0].transpose(0, 1)


@torch.inference_mode()
def probe(model: PreTrainedModel, max_model_len: int | None = None) -> Probe:
    """Run a few tokens through the model, and find its attention modules. Raises UnsupportedModel when the engine would
    compute it wrongly: state other than KV, attention that does not go through our function once per layer, or KV that
    the pool cannot keep.

    RoPE that depends on the batch is made independent of it, for sequences of up to `max_model_len` tokens (see
    `engine.model.rope`); without `max_model_len`, a model that has such RoPE is refused.
    """
    config = model.config.get_text_config()
    _refuse_by_config(config)
    _fix_rope(model, config, max_model_len)
    site = _ProbeSite(model.dtype)
    with _handled_by(site, model):
        _forward_few_tokens(model)
    with _handled_by(_ProbeSite(model.dtype), model):
        _require_only_hidden_states(model)
    _require_given_positions(model)
    layers = [module for module, _ in site.calls]
    num_held = num_held_layers(model)
    if len(layers) != num_held or len(set(layers)) != len(layers):
        raise UnsupportedModel(
            f"{type(model).__name__}: {len(set(layers))} modules called paged attention {len(layers)} times, "
            f"for {num_held} layers"
        )
    if any(getattr(module, "is_causal", True) is False for module in layers):
        raise UnsupportedModel(f"{type(model).__name__}: its tokens attend to later ones")
    kv = tuple(kept for _, kept in site.calls)
    context: float = max_model_len or getattr(config, "max_position_embeddings", None) or math.inf
    _require_windows(model, kv, site.masks, context)
    require_served(kv, type(model).__name__)
    return Probe(layers, kv)


@contextlib.contextmanager
def _handled_by(site: AttentionSite, model: PreTrainedModel) -> Iterator[None]:
    """Within, the site handles all attention calls, and masks tell their windows."""
    for module in model.modules():
        bind(module, site)
    try:
        with _windows_in_masks(model.config):
            yield
    finally:
        for module in model.modules():
            bind(module, None)


def _forward_few_tokens(model: PreTrainedModel, first: int = 0) -> Tensor:
    """The logits, or a stage's hidden states, [1, 2, width]. first: the first token's id."""
    positions = torch.arange(_FEW, device=model.device)[None]
    return _run(model, (positions + first) % model.config.get_text_config().vocab_size, positions)


def _run(model: PreTrainedModel, ids: Tensor, positions: Tensor) -> Tensor:
    keep = torch.tensor([1, 3], device=model.device)
    try:
        logits: Tensor = model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=keep).logits
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise UnsupportedModel(f"{type(model).__name__} does not run on a flattened batch: {error}") from error
    if logits.shape[:2] != (1, 2):
        raise UnsupportedModel(f"{type(model).__name__} does not honour logits_to_keep: logits {tuple(logits.shape)}")
    return logits


def _require_given_positions(model: PreTrainedModel) -> None:
    """Refuse a model that counts positions itself, or mixes tokens otherwise than in attention: in a batch of several
    sequences, and in a later chunk of one, it would compute another text. The same token at the same position, several
    times, must be the same for it, if each attends to itself alone. A later pipeline stage gets no tokens."""
    if received_by(model) is not None:
        return
    config = model.config.get_text_config()
    token = ((getattr(config, "pad_token_id", None) or 0) + 1) % config.vocab_size  # that of padding may be all zeros
    site, ones = _AloneSite(model.dtype), torch.ones((1, _FEW), dtype=torch.int64, device=model.device)
    with _handled_by(site, model):
        _run(model, ones * token, ones)
    if not site.are_equal:
        raise UnsupportedModel(f"{type(model).__name__}: it does not take positions as they are given")


def _require_only_hidden_states(model: PreTrainedModel) -> None:
    """Refuse a pipeline stage that computes anything from tokens beside what it receives: it has a stand-in for the
    embedding."""
    if (received := received_by(model)) is None:
        return
    shape = 1, _FEW, model.config.get_text_config().hidden_size
    hidden = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(model.device, model.dtype)
    try:
        received.hidden = hidden.clone()
        one = _forward_few_tokens(model)
        received.hidden = hidden
        other = _forward_few_tokens(model, _FEW)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{type(model).__name__}: {_NEEDS_MORE}: {error}") from error
    finally:
        received.hidden = None
    if not close(one, other, rounding(model.dtype)):
        raise UnsupportedModel(f"{type(model).__name__}: {_NEEDS_MORE}")


@contextlib.contextmanager
def _windows_in_masks(config: Any) -> Iterator[None]:
    """Within, a model of ours gets `_window_of_mask` for its masks."""
    before = config._attn_implementation
    if before == IMPLEMENTATION:
        config._attn_implementation = _PROBED
    try:
        yield
    finally:
        config._attn_implementation = before


def _require_windows(
    model: PreTrainedModel, kv: tuple[LayerKv, ...], masks: list[Tensor | None], max_model_len: float
) -> None:
    """Refuse a model whose masks have other windows than its attention modules say, of which only we take notice, or
    in whose windows a token is not even itself. A window as long as the context is none."""
    for index, (layer, mask) in enumerate(zip(kv, masks, strict=True)):
        if mask is not None and mask.numel() > 1:
            raise UnsupportedModel(f"{type(model).__name__}: layer {index} has a mask of its own")
        masked = layer.sliding_window if mask is None else int(mask)
        said = layer.sliding_window
        if said is not None and said < 1:
            raise UnsupportedModel(f"{type(model).__name__}: layer {index} has a sliding window of {said} tokens")
        if min(masked or math.inf, max_model_len) != min(said or math.inf, max_model_len):
            windows = f"{masked or 'none'} in its mask, {said or 'none'} in its attention"
            raise UnsupportedModel(f"{type(model).__name__}: layer {index} has two sliding windows: {windows}")


def _refuse_by_config(config: Any) -> None:
    """Refuse what a probe of four tokens cannot detect."""
    kinds = set(getattr(config, "layer_types", None) or ())
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        raise UnsupportedModel(f"{config.model_type}: layers of type {', '.join(sorted(unknown))}")


def _fix_rope(model: PreTrainedModel, config: Any, max_model_len: int | None) -> None:
    kinds = rope.batch_dependent_types(config)
    if not kinds:
        return
    rotary = rope.rotary_modules(model)
    if max_model_len is None or not rotary:
        missing = "no module that computes it from positions" if not rotary else "a --max-model-len is needed"
        raise UnsupportedModel(f"{config.model_type}: RoPE of type {', '.join(kinds)}: {missing}")
    like = torch.empty(0, dtype=model.dtype, device=model.device)
    for module in rotary:
        if not rope.is_table(module):
            module.forward = rope.table_forward(module, config, max_model_len, like)
