"""How each module of a divided model is sharded, by name: transformers' tensor-parallel plan, or ours where it has
none."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from engine.model.errors import UnsupportedModel

REPLICATED = ("replicated_with_grad_allreduce",)
HEADS, KV_HEADS, FEATURES = "heads", "kv_heads", "features"
"""What something is divided by: attention heads, KV heads, or single features of an MLP. The first two are also our own
styles, for a parameter with an entry for each head."""


class Packed(NamedTuple):
    """Our own style, for a linear layer with some of the outputs that may be those of several layers.

    parts: by what the outputs of each of these layers are divided; they follow one another. If heads follow one another
    instead, each with its q, k and v, the layer has one part, of KV_HEADS. counts: by which numbers the module around
    the layer takes the outputs apart, where it does not ask for their width: names of its attributes (`config.` before
    those of its configuration), each with the heads that it counts, or of which it counts features.
    """

    parts: tuple[str, ...]
    counts: tuple[tuple[str, str], ...] = ()


Style = str | Packed
Plan = Mapping[str, Style]
_QKV = HEADS, KV_HEADS, KV_HEADS
_GATE_UP = Packed((FEATURES, FEATURES))
_ATTENTION: Plan = {**{f"self_attn.{part}_proj": "colwise" for part in "qkv"}, "self_attn.o_proj": "rowwise"}
_ATTENTION_WITH_SINKS: Plan = {**_ATTENTION, "self_attn.sinks": HEADS}
_PHI_ATTENTION: Plan = {
    "self_attn.qkv_proj": Packed(_QKV, (("config.num_attention_heads", HEADS), ("num_key_value_heads", KV_HEADS))),
    "self_attn.o_proj": "rowwise",
}
_PERSIMMON_ATTENTION: Plan = {
    "self_attn.query_key_value": Packed((KV_HEADS,), (("num_heads", HEADS),)),
    "self_attn.dense": "rowwise",
}
_PACKED_MLP: Plan = {"mlp.gate_up_proj": _GATE_UP, "mlp.down_proj": "rowwise"}
_PACKED_SHARED_MLP: Plan = {"shared_mlp.input_linear": _GATE_UP, "shared_mlp.output_linear": "rowwise"}
_PERSIMMON_MLP: Plan = {"mlp.dense_h_to_4h": "colwise", "mlp.dense_4h_to_h": "rowwise"}


def _mlp(name: str) -> Plan:
    return {**{f"{name}.{part}_proj": "colwise" for part in ("gate", "up")}, f"{name}.down_proj": "rowwise"}


def _gpt2(packed: Packed) -> Plan:
    return {"attn.c_attn": packed, "attn.c_proj": "rowwise", "mlp.c_fc": "colwise", "mlp.c_proj": "rowwise"}


_LLAMA: Plan = {**_ATTENTION, **_mlp("mlp")}
_PHI3: Plan = {**_PHI_ATTENTION, **_PACKED_MLP}
_OWN: Mapping[str, Plan] = {
    **dict.fromkeys(("flint", "gpt_oss"), _ATTENTION_WITH_SINKS),
    "cohere": {"self_attn.q_norm.weight": HEADS, "self_attn.k_norm.weight": KV_HEADS},
    **dict.fromkeys(("granitemoe", "phimoe"), _ATTENTION),
    "granitemoeshared": {**_ATTENTION, **_PACKED_SHARED_MLP},
    "qwen2_moe": _mlp("mlp.shared_expert"),
    **dict.fromkeys(("cohere2_moe", "exaone_moe", "solar_open"), _mlp("mlp.shared_experts")),
    "afmoe": {**_ATTENTION, "self_attn.gate_proj": "colwise", **_mlp("mlp"), **_mlp("mlp.shared_experts")},
    **dict.fromkeys(("hunyuan_v1_dense", "qwen3_vl_text"), _LLAMA),
    "hunyuan_v1_moe": {**_ATTENTION, **_mlp("mlp.shared_mlp")},
    **dict.fromkeys(("phi3", "phi4_multimodal"), _PHI3),
    **dict.fromkeys(("glm", "glm4", "glm4v_text", "glm_ocr_text"), _PACKED_MLP),
    "gpt_neox": {"attention.query_key_value": Packed((KV_HEADS,))},
    "persimmon": {**_PERSIMMON_ATTENTION, **_PERSIMMON_MLP},
    "gpt2": _gpt2(Packed(_QKV, (("split_size", HEADS),))),
    "gpt_bigcode": _gpt2(Packed((KV_HEADS,), (("num_heads", HEADS),))),
    "gpt_bigcode, multi_query": _gpt2(Packed(_QKV, (("embed_dim", HEADS),))),
}
"""By `model_type`: what transformers' plans lack, or state otherwise. Names are those within a decoder layer."""
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


def styles(model: PreTrainedModel) -> Callable[[str], Style | None]:
    """A function that maps the name of a module or parameter to its tensor-parallel style; None: it is whole on every
    rank. Raises UnsupportedModel for a model without a plan."""
    stated: Plan = getattr(model, "_tp_plan", None) or {}
    plan = {**stated, **_own(model)}
    if not any(isinstance(style, Packed) or style in ("colwise", "rowwise") for style in plan.values()):
        raise UnsupportedModel(f"{type(model).__name__} has no tensor-parallel plan")
    patterns = [(re.compile(re.escape(key).replace(r"\*", r"\d+")), style) for key, style in plan.items()]

    def style_of(name: str) -> Style | None:
        return next((style for pattern, style in patterns if pattern.fullmatch(name)), None)

    return style_of


def _own(model: PreTrainedModel) -> Plan:
    """Our plan, with the names that the model has."""
    config = model.config.get_text_config()
    kind = config.model_type
    if getattr(config, "multi_query", False):  # then q, k and v of GPT-BigCode follow one another, not heads
        kind += ", multi_query"
    if not (plan := _OWN.get(kind)):
        return {}
    decoder: Any = model.get_decoder()
    layers = next(module for module in decoder.children() if isinstance(module, nn.ModuleList))
    prefix = next(name for name, module in model.named_modules() if module is layers)
    return {f"{prefix}.*.{name}": style for name, style in plan.items()}
