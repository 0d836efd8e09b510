"""Refuses a model for what its configuration says, before its weights are read, which takes minutes."""

from __future__ import annotations

from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from engine.model.errors import UnsupportedModel

_LAYERS = {"full_attention", "sliding_attention"}
_MLA = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def auto_class_of(config: Any) -> Any:
    """transformers' auto class that makes a model of a checkpoint's configuration. Of a model that also sees images,
    the part for text is served. Raises UnsupportedModel."""
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    raise UnsupportedModel(
        f"transformers makes no model of model_type {config.model_type} as AutoModelForCausalLM or "
        "AutoModelForImageTextToText"
    )


def require_supported_config(config: Any) -> None:
    """config: that of the language model. Raises UnsupportedModel."""
    if unknown := set(getattr(config, "layer_types", None) or ()) - _LAYERS:
        raise UnsupportedModel(f"{config.model_type}: layers of type {', '.join(sorted(unknown))}")
    if getattr(config, "attn_temperature_tuning", False) and not all(config.no_rope_layers):
        raise UnsupportedModel(
            f"{config.model_type}: attn_temperature_tuning: layers without RoPE (no_rope_layers) scale queries by "
            "positions that they count themselves"
        )
    nope, rope, value = (getattr(config, name, None) for name in _MLA)
    if nope is not None and rope is not None and value not in (None, nope + rope):
        raise UnsupportedModel(
            f"{config.model_type}: multi-head latent attention (MLA) is not supported: K has {nope} + {rope} numbers "
            f"(qk_nope_head_dim, qk_rope_head_dim) and V {value} (v_head_dim), and a KV pool has one width for both. "
            "No flag changes that: choose another model"
        )
