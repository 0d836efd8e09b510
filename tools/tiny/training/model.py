"""The architecture of baton-tiny, its initial weights, and its files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from tools.tiny.training.tokenizer import BOS, EOT, IM_END, MAX_LENGTH, PAD, VOCAB_SIZE

HEAD_DIM = 32

# 100,000 rather than 10,000: with 32 dimensions per head, five pairs of dimensions instead of two then rotate by less
# than a quarter turn over 4,096 positions, and so can match content at any distance.
ROPE_THETA = 100_000.0

GENERATION_CONFIG = {
    "bos_token_id": BOS,
    "pad_token_id": PAD,
    "eos_token_id": [IM_END, EOT],
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.95,
}

HOW_IT_WAS_LOADED = {"backend", "is_local", "local_files_only"}  # written by transformers 5, needed by nothing


def model_config() -> LlamaConfig:
    """The architecture of baton-tiny."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=5,
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


def new_model(seed: int, config: PreTrainedConfig) -> PreTrainedModel:
    """A new model; initial projections into the residual stream are scaled down by the depth (GPT-2's rule)."""
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    scale = 1 / math.sqrt(2 * model.config.num_hidden_layers)
    with torch.no_grad():
        for layer in model.model.layers:
            for name, parameter in layer.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                    parameter.mul_(scale)
    made: PreTrainedModel = model
    return made


def save(out: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write the weights, rounded to bf16, with their configuration and tokenizer."""
    rounded: Any = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    rounded.load_state_dict(model.state_dict())
    rounded = rounded.to(torch.bfloat16)
    rounded.generation_config = type(rounded.generation_config)(**GENERATION_CONFIG)
    rounded.save_pretrained(out)
    tokenizer.save_pretrained(out)
    path = out / "tokenizer_config.json"  # a class name that transformers 4 and 5 both know
    config = {key: value for key, value in json.loads(path.read_text()).items() if key not in HOW_IT_WAS_LOADED}
    path.write_text(json.dumps({**config, "tokenizer_class": "PreTrainedTokenizerFast"}, indent=2) + "\n")
