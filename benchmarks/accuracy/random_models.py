"""Random models of the popular families for `benchmarks.accuracy.logits`, small enough to compute quickly.

Two layers, four query heads and two KV heads of dimension 32 or 64. Every family keeps its specific features: biases,
norms and their placement, windows, caps, sinks, multipliers, RoPE.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import (
    Cohere2Config,
    Ernie4_5_MoeConfig,
    Exaone4Config,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    LlamaConfig,
    MiniMaxM2Config,
    Mistral3Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3VLConfig,
    SmolLM3Config,
    Starcoder2Config,
)

from engine.model.load.supported import auto_class_of

VOCAB_SIZE = 160
MAX_MODEL_LEN = 128
HEAD_DIM = 64

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "initializer_range": 0.1,  # spreads the logits without making attention too sharp for 16 bits
}
_HEADS: dict[str, Any] = {**_SHAPE, "head_dim": HEAD_DIM, "tie_word_embeddings": False}
_PHI3: dict[str, Any] = {**_SHAPE, "hidden_size": 256, "partial_rotary_factor": 0.75}  # the config has no head_dim
_ORIGINAL = 64
_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + 0.01 * i for i in range(24)],
    "long_factor": [1.0 + 0.2 * i for i in range(24)],
    "original_max_position_embeddings": _ORIGINAL,
}
_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": _ORIGINAL,
}
_DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1.5e5,
    "factor": 2.0,
    "original_max_position_embeddings": _ORIGINAL,
}
_MINISTRAL: dict[str, Any] = {**_YARN, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
_MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}
_MIXED: dict[str, Any] = {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "out_hidden_size": 128,
    "depth": 1,
    "num_heads": 2,
}
_PIXTRAL: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
_SHARED: dict[str, Any] = {"num_kv_shared_layers": 1, "hidden_size_per_layer_input": 16, "laurel_rank": 8}
_DEEPSEEK: dict[str, Any] = {
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}

FAMILIES: Mapping[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**_HEADS, rope_parameters=_LLAMA3),
    "llama dynamic ntk": lambda: LlamaConfig(
        **{**_HEADS, "max_position_embeddings": _ORIGINAL}, rope_parameters=_DYNAMIC
    ),
    "qwen2": lambda: Qwen2Config(**_SHAPE, use_sliding_window=True, sliding_window=24, max_window_layers=1),
    "qwen3": lambda: Qwen3Config(**_HEADS),
    "mistral window": lambda: MistralConfig(**_HEADS, sliding_window=20),
    "gemma2": lambda: Gemma2Config(
        **_HEADS, sliding_window=20, query_pre_attn_scalar=48, attn_logit_softcapping=5.0, final_logit_softcapping=100.0
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **_HEADS, sliding_window=20, query_pre_attn_scalar=48, layer_types=["sliding_attention", "full_attention"]
    ),
    "phi3": lambda: Phi3Config(**_PHI3),
    "phi3 longrope": lambda: Phi3Config(**_PHI3, original_max_position_embeddings=_ORIGINAL, rope_parameters=_LONGROPE),
    "granite": lambda: GraniteConfig(
        **_SHAPE, embedding_multiplier=3.0, residual_multiplier=0.4, attention_multiplier=0.1, logits_scaling=2.0
    ),
    "olmo2": lambda: Olmo2Config(**_SHAPE),
    "gpt-oss": lambda: GptOssConfig(
        **_HEADS, sliding_window=20, num_local_experts=4, num_experts_per_tok=2, rope_parameters=_YARN
    ),
    "qwen3 moe": lambda: Qwen3MoeConfig(
        **_HEADS, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=64, norm_topk_prob=True
    ),
    "mixtral": lambda: MixtralConfig(**_HEADS, num_local_experts=4, num_experts_per_tok=2),
    "olmoe": lambda: OlmoeConfig(**_SHAPE, num_experts=8, num_experts_per_tok=3),
    "granite moe": lambda: GraniteMoeConfig(
        **_SHAPE, num_local_experts=6, num_experts_per_tok=2, residual_multiplier=0.4, logits_scaling=2.0
    ),
    "glm4 moe": lambda: Glm4MoeConfig(
        **_HEADS, **_DEEPSEEK, num_local_experts=8, num_experts_per_tok=3, moe_intermediate_size=64, use_qk_norm=True
    ),
    "minimax m2": lambda: MiniMaxM2Config(**_HEADS, num_local_experts=8, num_experts_per_tok=3, rotary_dim=32),
    "cohere2": lambda: Cohere2Config(**_HEADS, **_MIXED, logit_scale=0.3),
    "ernie4.5 moe": lambda: Ernie4_5_MoeConfig(
        **_SHAPE, moe_num_experts=8, moe_k=3, moe_intermediate_size=64, moe_layer_end_index=1, use_bias=True
    ),
    "exaone4": lambda: Exaone4Config(**_HEADS, **_MIXED),
    "gemma3n": lambda: Gemma3nTextConfig(
        **{**_HEADS, "num_hidden_layers": 4, "intermediate_size": [192] * 4},
        **_SHARED,
        sliding_window=20,
        layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
        vocab_size_per_layer_input=VOCAB_SIZE,
    ),
    "glm4": lambda: Glm4Config(**_HEADS, attention_bias=True),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB_SIZE, n_positions=MAX_MODEL_LEN, n_embd=128, n_layer=2, n_head=4, initializer_range=0.1
    ),
    "gpt neox": lambda: GPTNeoXConfig(**_SHAPE),
    "mistral3": lambda: Mistral3Config(
        text_config={
            **_HEADS,
            "model_type": "ministral3",
            "rope_parameters": {**_MINISTRAL, "llama_4_scaling_beta": 0.1},
        },
        vision_config={**_PIXTRAL, "hidden_size": 32, "intermediate_size": 32, "model_type": "pixtral"},
    ),
    "olmo3": lambda: Olmo3Config(**_SHAPE, **_MIXED),
    "qwen2.5 vl": lambda: Qwen2_5_VLConfig(
        text_config={**_SHAPE, "hidden_size": 256, "rope_parameters": _MROPE},
        vision_config={**_VISION, "out_hidden_size": 256},
    ),
    "qwen3 vl": lambda: Qwen3VLConfig(
        text_config={**_HEADS, "rope_parameters": {**_MROPE, "mrope_interleaved": True}},
        vision_config={**_VISION, "deepstack_visual_indexes": [0]},
    ),
    "smollm3": lambda: SmolLM3Config(**_SHAPE, no_rope_layers=[1, 0]),
    "starcoder2": lambda: Starcoder2Config(**_SHAPE, sliding_window=20, tie_word_embeddings=True),
}


@torch.inference_mode(False)
def make(family: str, dtype: torch.dtype, device: torch.device, attention: str) -> PreTrainedModel:
    """The family's model with that attention implementation. The weights are deterministic and rounded to bf16, so that
    models of all dtypes have the same."""
    torch.manual_seed(7)
    config = FAMILIES[family]()
    model = auto_class_of(config).from_config(config, dtype=torch.float32, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms, biases and sinks, whose initial ones or zeros would hide mistakes
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
            parameter.copy_(parameter.bfloat16().float())
    made: PreTrainedModel = model.to(device=device, dtype=dtype).eval().requires_grad_(False)
    return made
