"""Small random models with baton-tiny's tokenizer, and what transformers makes of prompts with them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from engine.checkpoint import EMBEDDED
from engine.model.load.checkpoint import Checkpoint
from tests.e2e import references
from tests.e2e.reference_file import Reference

SEED = 20_26
NUM_PROMPTS = 16
MAX_TOKENS = 20
TINY = EMBEDDED["baton-tiny"]
SHAPE: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": Checkpoint.open(TINY).vocab_size,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "initializer_range": 0.2,  # logits far apart, and experts
    }
)


def made(config: Any, root: Path) -> tuple[Path, list[Reference]]:
    """A model of that configuration, the same each time, and what transformers makes of prompts in fp32."""
    folder = root / "model"
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.normal_(0, 0.2)
    model.save_pretrained(folder)
    for file in TINY.glob("*token*"):
        shutil.copy(file, folder)
    model.generation_config = GenerationConfig()
    rng = Random(SEED)
    vocab_size = SHAPE["vocab_size"]
    prompts = [[rng.randrange(10, vocab_size) for _ in range(rng.randrange(1, 120))] for _ in range(NUM_PROMPTS)]
    return folder, [references.generate(model, [], "ids", prompt, MAX_TOKENS, True) for prompt in prompts]
