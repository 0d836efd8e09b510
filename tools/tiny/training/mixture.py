"""baton-tiny-moe: gpt-oss's architecture in the size of baton-tiny, and its forward pass over slabs.

Eight experts, of which a token takes two; attention sinks in all layers; one layer with a sliding window. In training
all experts compute all tokens, as one wide network whose parts are multiplied by the routing weights, zero for experts
that were not chosen: at this size that costs less than sorting tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GptOssConfig

from tools.tiny.training.forward import FlatForward, rms_norm, rotate
from tools.tiny.training.model import HEAD_DIM, ROPE_THETA
from tools.tiny.training.settings import Settings
from tools.tiny.training.tokenizer import BOS, EOT, IM_END, MAX_LENGTH, PAD, VOCAB_SIZE

WINDOW = 128
BALANCE_LOSS = 0.01
"""Relative to the loss on answers: enough to keep all experts in use."""
_PADDED = 40
"""HEAD_DIM and a column for the sink, as a multiple of 8, which fused attention wants."""


def mixture_config() -> GptOssConfig:
    """The architecture of baton-tiny-moe."""
    full, window = "full_attention", "sliding_attention"
    return GptOssConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=96,
        num_local_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=5,
        layer_types=[full, window, full, full, full],
        sliding_window=WINDOW,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_LENGTH,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=[IM_END, EOT],
        pad_token_id=PAD,
    )


def before_attention(
    x: Tensor, norm: Tensor, projections: list[Tensor], cos: Tensor, sin: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    """x [num_tokens, hidden] fp32 to q, k, v [num_tokens, num_heads, head_dim], repeating the KV heads.

    projections: the weights of q, k and v, and then their biases.
    """
    h = rms_norm(x, norm).to(dtype)
    pairs = zip(projections[:3], projections[3:], strict=True)
    q, k, v = (F.linear(h, w.to(dtype), b.to(dtype)).view(len(x), -1, HEAD_DIM) for w, b in pairs)
    repeats = q.shape[1] // k.shape[1]
    q, k = rotate(q.float(), cos, sin).to(dtype), rotate(k.float(), cos, sin).to(dtype)
    return [q, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)]


def routing_weights(h: Tensor, weight: Tensor, bias: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Each expert's weight [num_tokens, num_experts] fp32, zero where it was not chosen; and how unevenly experts are
    used, 1 if not at all (Switch Transformers, equation 4)."""
    logits = F.linear(h.float(), weight, bias)
    values, ids = logits.topk(top_k, dim=-1)
    weights = torch.zeros_like(logits).scatter(-1, ids, values.softmax(-1))
    chosen = (weights > 0).float().mean(0) / top_k
    balance = logits.shape[-1] * (chosen * logits.softmax(-1).mean(0)).sum()
    return weights, balance


def after_attention(
    x: Tensor,
    attended: Tensor,
    output: list[Tensor],
    norm: Tensor,
    router: list[Tensor],
    experts: list[Tensor],
    numbers: tuple[int, float, float],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The output projection and the experts, both added to x [num_tokens, hidden] fp32; and `routing_weights`' balance.

    output, router: a weight and a bias. experts: gate_up_proj [num_experts, hidden, 2 * width], gate and up in turns,
    its bias, down_proj [num_experts, width, hidden], its bias. numbers: top_k, alpha and limit.
    """
    top_k, alpha, limit = numbers
    x = x + F.linear(attended, output[0].to(dtype), output[1].to(dtype)).float()
    h = rms_norm(x, norm)
    weights, balance = routing_weights(h, router[0], router[1], top_k)
    gate_up, gate_up_bias, down, down_bias = experts
    wide = gate_up.transpose(0, 1).reshape(gate_up.shape[1], -1)
    both = (h.to(dtype) @ wide.to(dtype) + gate_up_bias.flatten().to(dtype)).view(len(x), len(gate_up), -1)
    gate, up = both[..., ::2].clamp(max=limit), both[..., 1::2].clamp(-limit, limit)
    inner = (up + 1) * gate * torch.sigmoid(alpha * gate) * weights[..., None].to(dtype)
    out = inner.flatten(1) @ down.flatten(0, 1).to(dtype)
    return x + out.float() + weights @ down_bias, balance


def attend_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int | None, shapes: Sequence[tuple[int, int]]
) -> Tensor:
    """Causal attention inside each row of each (rows, length) of `shapes`; returns [num_tokens, hidden].

    A sink is a logit beside those of the keys, whose value is zero: a first key that differs from all others in a
    column of its own, in which queries are one. A query of nobody is beside it, so that the mask remains a triangle.
    """
    scale = HEAD_DIM**-0.5
    extra = _PADDED - HEAD_DIM
    first = F.pad((sinks / scale).to(k.dtype)[:, None], (HEAD_DIM, extra - 1))  # [heads, padded]
    parts, start = [], 0
    for rows, length in shapes:
        end = start + rows * length
        own = [t[start:end].reshape(rows, length, -1, HEAD_DIM).transpose(1, 2) for t in (q, k, v)]
        q_part, k_part, v_part = (F.pad(t, (0, extra, 1, 0)) for t in own)
        q_part = q_part + F.pad(torch.ones_like(q_part[..., :1]), (HEAD_DIM, extra - 1))
        sink = first[None, :, None].expand(rows, -1, -1, -1)
        k_part = torch.cat([sink, k_part[:, :, 1:]], 2)
        mask = None if window is None or length <= window else _window_mask(length + 1, window, q.device)
        out = F.scaled_dot_product_attention(
            q_part, k_part, v_part, attn_mask=mask, is_causal=mask is None, scale=scale
        )
        parts.append(out[:, :, 1:, :HEAD_DIM].transpose(1, 2).reshape(rows * length, -1))
        start = end
    return torch.cat(parts)


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """[length, length]: the keys of each query; the first one is everybody's."""
    places = torch.arange(length, device=device)
    back = places[:, None] - places[None]
    return (back >= 0) & ((back < window) | (places[None] == 0))


class MixtureForward(FlatForward):
    """The forward pass of a GptOssForCausalLM over slabs, optionally compiled for one number of tokens. `balance`: of
    the last pass, the mean over layers, of which BALANCE_LOSS is added to the loss."""

    def __init__(self, model: Any, settings: Settings, compiled: bool) -> None:
        super().__init__(model, settings, compiled)
        wrap: Callable[[Any], Any] = (lambda fn: torch.compile(fn, dynamic=False)) if compiled else (lambda fn: fn)
        self._before, self._after = wrap(before_attention), wrap(after_attention)

    def hidden(self, tokens: Tensor, shapes: Sequence[tuple[int, int]]) -> Tensor:
        """The last hidden state [num_tokens, hidden], before the final norm."""
        model, dtype = self._model.model, self._dtype
        places = torch.cat([torch.arange(length, device=self._device).repeat(rows) for rows, length in shapes])
        cos, sin = self._cos[places], self._sin[places]
        x = F.embedding(tokens, model.embed_tokens.weight)
        balances = []
        for layer in model.layers:
            a, m = layer.self_attn, layer.mlp
            linears = (a.q_proj, a.k_proj, a.v_proj)
            projections = [*(linear.weight for linear in linears), *(linear.bias for linear in linears)]
            q, k, v = self._before(x, layer.input_layernorm.weight, projections, cos, sin, dtype)
            attended = attend_with_sinks(q, k, v, a.sinks, a.sliding_window, shapes)
            output, router, e = [a.o_proj.weight, a.o_proj.bias], [m.router.weight, m.router.bias], m.experts
            experts = [e.gate_up_proj, e.gate_up_proj_bias, e.down_proj, e.down_proj_bias]
            numbers = (m.router.top_k, float(e.alpha), float(e.limit))
            norm = layer.post_attention_layernorm.weight
            x, balance = self._after(x, attended, output, norm, router, experts, numbers, dtype)
            balances.append(balance)
        self.balance = torch.stack(balances).mean()
        return x

    def extra_loss(self) -> Tensor | float:
        return BALANCE_LOSS * self.balance


def forward_of(model: Any, settings: Settings, compiled: bool) -> FlatForward:
    """The forward pass of either model."""
    kind = MixtureForward if model.config.model_type == "gpt_oss" else FlatForward
    return kind(model, settings, compiled)
