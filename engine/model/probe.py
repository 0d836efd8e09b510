"""A first forward of a few tokens, which shows what KV a model keeps, and whether the engine can run it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from baton.layout import LayerKv
from engine.model import rope
from engine.model.attention import (
    IMPLEMENTATION,
    OWN_ATTENTION,
    AttentionCall,
    AttentionSite,
    attend_within,
    bind,
    forward,
)
from engine.model.errors import UnsupportedModel
from engine.model.experts import loop_where_not_aligned
from engine.model.kv_pool import require_served
from engine.model.missing_modules import num_held_layers, received_by
from engine.model.tolerance import Tolerance, close, rounding

_PROBED = "baton_probed"
"""The attention implementation's name while a model is probed, so that masks tell their windows."""
_FEW = 4
"""Tokens of a probe."""
_NEEDS_MORE = "its later pipeline stages need more than hidden states"


def _window_of_mask(*, local_size: int | None = None, **_: object) -> Tensor:
    """In place of a mask: the window that it would have, [1, 1, 1, 1]; 0: none."""
    return torch.full((1, 1, 1, 1), local_size or 0)


AttentionInterface.register(_PROBED, forward)
AttentionMaskInterface.register(_PROBED, _window_of_mask)


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


@torch.inference_mode()
def probe(model: PreTrainedModel, max_model_len: int | None = None) -> Probe:
    """Run a few tokens through the model, and find its attention modules. Raises UnsupportedModel when the engine would
    compute it wrongly: state other than KV, attention that does not go through our function once per layer, or KV that
    the pool cannot keep.

    RoPE that depends on the batch is made independent of it, for sequences of up to `max_model_len` tokens (see
    `engine.model.rope`); without `max_model_len`, a model that has such RoPE is refused.
    """
    config = model.config.get_text_config()
    _fix_rope(model, config, max_model_len)
    loop_where_not_aligned(model)
    site, logits = _watched(model)
    with _handled_by(_ProbeSite(model.dtype), model):
        _require_only_hidden_states(model)
    _require_given_positions(model, logits)
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
    kv = _with_windows(model, kv, site.masks, context)
    require_served(kv, type(model).__name__)
    return Probe(layers, kv)


def _watched(model: PreTrainedModel) -> tuple[_ProbeSite, Tensor]:
    """What attention calls a few tokens make, of which there are some, and their logits. Raises UnsupportedModel."""
    site = _ProbeSite(model.dtype)
    try:
        with _handled_by(site, model):
            logits = _forward_few_tokens(model)
    except UnsupportedModel as error:
        if received_by(model) is not None:
            raise UnsupportedModel(f"{type(model).__name__}: {_NEEDS_MORE}: {error}") from error
        if site.calls or hasattr(sys.modules[type(model).__module__], "ALL_ATTENTION_FUNCTIONS"):
            raise
    if not site.calls:
        raise UnsupportedModel(f"{type(model).__name__}: {OWN_ATTENTION}")
    return site, logits


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


def _forward_few_tokens(model: PreTrainedModel, first: int = 0, *, given: bool = True) -> Tensor:
    """The logits, or a stage's hidden states, [1, 2, width]. first: the first token's id. given: whether the model is
    told the positions."""
    positions = torch.arange(_FEW, device=model.device)[None]
    ids = (positions + first) % model.config.get_text_config().vocab_size
    return _run(model, ids, positions if given else None)


def _run(model: PreTrainedModel, ids: Tensor, positions: Tensor | None) -> Tensor:
    keep = torch.tensor([1, 3], device=model.device)
    try:
        logits: Tensor = model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=keep).logits
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise UnsupportedModel(f"{type(model).__name__} does not run on a flattened batch: {error}") from error
    if logits.shape[:2] != (1, 2):
        raise UnsupportedModel(f"{type(model).__name__} does not honour logits_to_keep: logits {tuple(logits.shape)}")
    return logits


def _require_given_positions(model: PreTrainedModel, logits: Tensor) -> None:
    """Refuse a model that counts positions otherwise than from 0 (RoBERTa). Refuse one that counts them itself, or
    mixes tokens otherwise than in attention: in a batch of several sequences, and in a later chunk of one, it would
    compute another text. The same token at the same position, several times, must be the same for it, if each attends
    to itself alone. logits: with positions from 0. A later pipeline stage gets no tokens."""
    if received_by(model) is not None:
        return
    with _handled_by(_ProbeSite(model.dtype), model):
        own = _forward_few_tokens(model, given=False)
    if not close(own.nan_to_num(), logits.nan_to_num(), rounding(model.dtype)):
        raise UnsupportedModel(f"{type(model).__name__}: its positions do not begin at 0")
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


def _with_windows(
    model: PreTrainedModel, kv: tuple[LayerKv, ...], masks: list[Tensor | None], max_model_len: float
) -> tuple[LayerKv, ...]:
    """The KV of the layers, with the window of a layer's mask where its attention module says none (Qwen2-MoE): masks
    are what transformers' eager attention takes notice of. Refuse a model where they disagree otherwise, or in whose
    windows a token is not even itself. A window as long as the context is none."""
    found = []
    for index, (layer, mask) in enumerate(zip(kv, masks, strict=True)):
        if mask is not None and mask.numel() > 1:
            raise UnsupportedModel(f"{type(model).__name__}: layer {index} has a mask of its own")
        said = layer.sliding_window
        masked = said if mask is None else int(mask) or None
        for window in (said, masked):
            if window is not None and window < 1:
                raise UnsupportedModel(f"{type(model).__name__}: layer {index} has a sliding window of {window} tokens")
        if said is not None and min(masked or math.inf, max_model_len) != min(said, max_model_len):
            windows = f"{masked or 'none'} in its mask, {said} in its attention"
            raise UnsupportedModel(f"{type(model).__name__}: layer {index} has two sliding windows: {windows}")
        found.append(dataclasses.replace(layer, sliding_window=said or masked))
    return tuple(found)


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
