"""The forward pass over slabs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tools.tiny.training.model import HEAD_DIM, ROPE_THETA
from tools.tiny.training.settings import Settings
from tools.tiny.training.tokenizer import MAX_LENGTH


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Llama's RMS norm, in fp32."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on x [num_tokens, heads, head_dim], with cos and sin [num_tokens, 1, head_dim]."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def before_attention(
    x: Tensor, norm: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """x [num_tokens, hidden] fp32 to q, k, v [num_tokens, num_heads, head_dim], repeating the KV heads."""
    h = rms_norm(x, norm).to(dtype)
    q, k, v = (F.linear(h, w.to(dtype)).view(len(x), -1, HEAD_DIM) for w in (wq, wk, wv))
    repeats = q.shape[1] // k.shape[1]
    q, k = rotate(q.float(), cos, sin).to(dtype), rotate(k.float(), cos, sin).to(dtype)
    return q, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)


def after_attention(
    x: Tensor, attended: Tensor, wo: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, dtype: torch.dtype
) -> Tensor:
    """The output projection and the feed-forward network, both added to x [num_tokens, hidden] fp32."""
    x = x + F.linear(attended, wo.to(dtype)).float()
    h = rms_norm(x, norm).to(dtype)
    return x + F.linear(F.silu(F.linear(h, gate.to(dtype))) * F.linear(h, up.to(dtype)), down.to(dtype)).float()


def head_logits(x: Tensor, norm: Tensor, embedding: Tensor, dtype: torch.dtype) -> Tensor:
    """Logits [num_tokens, vocab] fp32."""
    return F.linear(rms_norm(x, norm).to(dtype), embedding.to(dtype)).float()


def head_loss(x: Tensor, norm: Tensor, embedding: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    """The cross entropy of each target [num_tokens]."""
    return F.cross_entropy(head_logits(x, norm, embedding, dtype), targets, reduction="none")


def attend(q: Tensor, k: Tensor, v: Tensor, shapes: Sequence[tuple[int, int]]) -> Tensor:
    """Causal attention inside each row of each (rows, length) of `shapes`; returns [num_tokens, hidden]."""
    parts, start = [], 0
    for rows, length in shapes:
        end = start + rows * length
        q_part, k_part, v_part = (t[start:end].reshape(rows, length, -1, HEAD_DIM).transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q_part, k_part, v_part, is_causal=True)
        parts.append(out.transpose(1, 2).reshape(rows * length, -1))
        start = end
    return torch.cat(parts)


class FlatForward:
    """The forward pass of a LlamaForCausalLM over slabs, optionally compiled for one number of tokens."""

    def __init__(self, model: Any, settings: Settings, compiled: bool) -> None:
        self._model, self._dtype, self._device = model, settings.dtype, settings.device
        wrap: Callable[[Any], Any] = (lambda fn: torch.compile(fn, dynamic=False)) if compiled else (lambda fn: fn)
        self._before, self._after, self._loss = wrap(before_attention), wrap(after_attention), wrap(head_loss)
        inverse = ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
        angles = torch.outer(torch.arange(MAX_LENGTH, dtype=torch.float64), inverse).repeat(1, 2)[:, None]
        self._cos, self._sin = angles.cos().float().to(self._device), angles.sin().float().to(self._device)

    def hidden(self, tokens: Tensor, shapes: Sequence[tuple[int, int]]) -> Tensor:
        """The last hidden state [num_tokens, hidden], before the final norm."""
        model = self._model.model
        places = torch.cat([torch.arange(length, device=self._device).repeat(rows) for rows, length in shapes])
        cos, sin = self._cos[places], self._sin[places]
        x = F.embedding(tokens, model.embed_tokens.weight)
        for layer in model.layers:
            a, m, dtype = layer.self_attn, layer.mlp, self._dtype
            weights = (a.q_proj.weight, a.k_proj.weight, a.v_proj.weight)
            q, k, v = self._before(x, layer.input_layernorm.weight, *weights, cos, sin, dtype)
            weights = (m.gate_proj.weight, m.up_proj.weight, m.down_proj.weight)
            norm = layer.post_attention_layernorm.weight
            x = self._after(x, attend(q, k, v, shapes), a.o_proj.weight, norm, *weights, dtype)
        return x

    def losses(self, tokens: Tensor, targets: Tensor, shapes: Sequence[tuple[int, int]]) -> Tensor:
        """The cross entropy of each target [num_tokens]."""
        model = self._model.model
        x = self.hidden(tokens, shapes)
        losses: Tensor = self._loss(x, model.norm.weight, model.embed_tokens.weight, targets, self._dtype)
        return losses

    def extra_loss(self) -> Tensor | float:
        """What the last pass adds to the loss."""
        return 0.0

    def predicted(self, tokens: Tensor, shapes: Sequence[tuple[int, int]]) -> Tensor:
        """The most likely next token after each token [num_tokens]."""
        model = self._model.model
        x = self.hidden(tokens, shapes)
        return head_logits(x, model.norm.weight, model.embed_tokens.weight, self._dtype).argmax(-1)


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """An array of small unsigned numbers as int64 on the device."""
    tensor = torch.from_numpy(array.astype(np.int32))
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True).long()
