"""Forwards of a few tokens over the whole model, for the probes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from baton.layout import LayerKv
from baton_kernels.paged_attention import PagedBatch
from engine.model.attention import AttentionCall, AttentionSite, attach, attend_within, bind
from engine.model.fast.target import Target
from engine.model.kv_pool import KvPool

NUM_TOKENS = 8
BLOCK_SIZE = 16


class UnpagedAttention:
    """An `AttentionSite`: attention among the tokens of the forward alone, without a KV pool."""

    def attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        return attend_within(call)


def run_model(target: Target, site: AttentionSite) -> Tensor:
    """Run one prompt; `site` handles its attention calls. Returns its logits, [NUM_TOKENS, vocab_size], fp32; a stage
    before the last returns hidden states instead."""
    for module in target.layers:
        bind(module, site)
    try:
        return _forward(target, 0, NUM_TOKENS)
    finally:
        for module in target.layers:
            bind(module, None)


def logits_as_served(target: Target, kv: tuple[LayerKv, ...]) -> Tensor:
    """The logits, [NUM_TOKENS, vocab_size], fp32, of a short prompt and of one token decoded after it, over a pool of
    two blocks."""
    device = target.model.device
    (step,) = attach(target.layers, KvPool(kv, 2, BLOCK_SIZE, device))
    rows = []
    try:
        for start, end in ((0, NUM_TOKENS - 1), (NUM_TOKENS - 1, NUM_TOKENS)):
            step.batch = PagedBatch.build([[1]], [end - start], [end], BLOCK_SIZE, device)
            step.slot_mapping = step.batch.slot_mapping()
            rows.append(_forward(target, start, end))
    finally:
        for module in target.layers:
            bind(module, None)
    return torch.cat(rows)


def _forward(target: Target, start: int, end: int) -> Tensor:
    """The logits of tokens [start, end) of a fixed prompt: [end - start, vocab_size], fp32."""
    device = target.model.device
    positions = torch.arange(start, end, device=device)[None]
    logits: Tensor = target.model(
        input_ids=(positions * 7919 + 11) % target.config.vocab_size,
        position_ids=positions,
        use_cache=False,
        logits_to_keep=torch.arange(end - start, device=device),
    ).logits
    return logits[0].float()
