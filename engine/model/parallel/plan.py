"""How each module of a divided model is sharded, by name: transformers' tensor-parallel plan, or ours where it has
none."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedModel

from engine.model.errors import UnsupportedModel

REPLICATED = ("replicated_with_grad_allreduce",)
HEADS, KV_HEADS = "heads", "kv_heads"
"""Our own styles, for a parameter with an entry for each attention head, or for each KV head."""
_ATTENTION = {
    **{f"model.layers.*.self_attn.{part}_proj": "colwise" for part in "qkv"},
    "model.layers.*.self_attn.o_proj": "rowwise",
}


def _mlp(name: str) -> Mapping[str, str]:
    return {
        **{f"model.layers.*.{name}.{part}_proj": "colwise" for part in ("gate", "up")},
        f"model.layers.*.{name}.down_proj": "rowwise",
    }


_SHARED_EXPERTS = _mlp("mlp.shared_experts")
_OWN: Mapping[str, Mapping[str, str]] = {
    "gpt_oss": {**_ATTENTION, "model.layers.*.self_attn.sinks": HEADS},
    "cohere": {
        "model.layers.*.self_attn.q_norm.weight": HEADS,
        "model.layers.*.self_attn.k_norm.weight": KV_HEADS,
    },
    "granitemoe": _ATTENTION,
    "phimoe": _ATTENTION,
    "qwen2_moe": _mlp("mlp.shared_expert"),
    **dict.fromkeys(("cohere2_moe", "exaone_moe", "solar_open"), _SHARED_EXPERTS),
    "afmoe": {**_ATTENTION, "model.layers.*.self_attn.gate_proj": "colwise", **_mlp("mlp"), **_SHARED_EXPERTS},
}
"""By `model_type`: what transformers' plans lack."""
_STAGED = ("granitemoe", "nemotron", "olmoe", "phimoe")
_STAGES: Mapping[str, Any] = {
    "embed_tokens": (["input_ids"], ["inputs_embeds"]),
    "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
    "norm": (["hidden_states"], ["hidden_states"]),
}


def own_stages(model_type: str) -> Mapping[str, Any]:
    """Our pipeline-parallel plan, in transformers' form, for a model type that has none there; empty: neither has
    one."""
    return _STAGES if model_type in _STAGED else {}


def styles(model: PreTrainedModel) -> Callable[[str], str | None]:
    """A function that maps the name of a module or parameter to its tensor-parallel style; None: it is whole on every
    rank. Raises UnsupportedModel for a model without a plan."""
    stated: dict[str, str] = getattr(model, "_tp_plan", None) or {}
    plan = {**stated, **_OWN.get(model.config.get_text_config().model_type, {})}
    if not any(style in ("colwise", "rowwise") for style in plan.values()):
        raise UnsupportedModel(f"{type(model).__name__} has no tensor-parallel plan")
    patterns = [(re.compile(re.escape(key).replace(r"\*", r"\d+")), style) for key, style in plan.items()]

    def style_of(name: str) -> str | None:
        return next((style for pattern, style in patterns if pattern.fullmatch(name)), None)

    return style_of
