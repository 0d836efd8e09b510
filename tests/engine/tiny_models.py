"""Random models of a few thousand parameters, one per family, as checkpoints on disk."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    Gemma2Config,
    Gemma3Config,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeConfig,
    LlamaConfig,
    MiniMaxM2Config,
    Mistral3Config,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from engine.checkpoint import EMBEDDED
from engine.model.load.supported import auto_class_of

VOCAB_SIZE = 160
EOS = 9

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": EOS,
    "pad_token_id": 1,
    "initializer_range": 0.3,  # logits far apart, so that greedy choices are no ties
}

CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "qwen2": Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=24, max_window_layers=1),
    "qwen3": Qwen3Config(**SHAPE),
    "mistral": MistralConfig(**SHAPE, sliding_window=20),
    "phi3": Phi3Config(**SHAPE, sliding_window=20),
    "gemma2": Gemma2Config(**SHAPE, sliding_window=20, query_pre_attn_scalar=16, attn_logit_softcapping=3.0),
    "gpt_oss": GptOssConfig(**SHAPE, sliding_window=20, num_local_experts=2, num_experts_per_tok=1),
}
MIXTURES = {
    "qwen2_moe": Qwen2MoeConfig(
        **SHAPE,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        use_sliding_window=True,
        sliding_window=20,
        max_window_layers=1,
    ),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32),
    "glm4_moe": Glm4MoeConfig(
        **SHAPE,
        num_local_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "olmoe": OlmoeConfig(**{**SHAPE, "head_dim": 8}, num_experts=8, num_experts_per_tok=3),
    "granite_moe": GraniteMoeConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, logits_scaling=2.0),
    "minimax_m2": MiniMaxM2Config(**SHAPE, num_local_experts=8, num_experts_per_tok=3, rotary_dim=8),
}
"""Whose checkpoints have other tensors than the model: mostly one for each expert."""


_VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
WITH_IMAGES = {
    "mistral3": Mistral3Config(
        text_config={**SHAPE, "model_type": "ministral3"},
        vision_config={**_VISION, "model_type": "pixtral", "image_size": 28, "patch_size": 14},
    ),
    "qwen2_5_vl": Qwen2_5_VLConfig(
        text_config={**SHAPE, "head_dim": 8, "rope_parameters": _MROPE},
        vision_config={"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64},
    ),
}
"""Which also see images: their text is served."""


def save(config: Any, folder: Path, seed: int = 0) -> Path:
    """Write a random model of that configuration, in fp32, to the folder."""
    torch.manual_seed(seed)
    auto_class_of(config).from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def within_a_larger_model(sizes: dict[str, Any]) -> Gemma3Config:
    """A language model of these sizes inside of Gemma 3, whose files call layers otherwise than the model does."""
    text = {name: size for name, size in {**SHAPE, **sizes}.items() if not name.endswith("token_id")}
    vision = {"hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    return Gemma3Config(text_config=text, vision_config={**vision, "vision_use_head": False})


SERVED_SHAPE = SHAPE | {"vocab_size": 4096, "eos_token_id": 4095}


def save_windowed(folder: Path) -> Path:
    """For nodes. Of five layers every other one has a window of 40 tokens: three KV groups."""
    shape = SERVED_SHAPE | {"num_hidden_layers": 5}
    return _save_served(Gemma2Config(**shape, sliding_window=40, query_pre_attn_scalar=16), folder)


def save_wide(folder: Path) -> Path:
    """For nodes. Rows are so wide that GPUs divide those of long prompts among ranks."""
    shape = SERVED_SHAPE | {"hidden_size": 4096, "max_position_embeddings": 4096, "initializer_range": 0.05}
    return _save_served(LlamaConfig(**shape), folder)


def _save_served(config: Any, folder: Path) -> Path:
    """With baton-tiny's tokenizer, which a node needs."""
    save(config, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED["baton-tiny"] / name, folder)
    return folder


def reference(folder: Path) -> PreTrainedModel:
    """The same checkpoint as transformers runs it by itself."""
    auto_class = auto_class_of(AutoConfig.from_pretrained(folder))
    model: PreTrainedModel = auto_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()
