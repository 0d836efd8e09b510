"""What a step must read and a prompt must compute, given only a model's configuration; and vLLM's measured times."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from baton.layout import KvLayout
from engine.model.fast import packed_bytes
from engine.model.load.checkpoint import Checkpoint

Cell = tuple[int, int]
"""(batch, context)"""


@dataclass(frozen=True, slots=True)
class VllmFigures:
    """Figures for one shape of model. prefill_ms: time to first token by prompt length. saturated_tokens_per_s: with
    prompts of 2048."""

    version: str
    machine: str
    decode_ms: dict[Cell, float]
    prefill_ms: dict[int, float]
    saturated_tokens_per_s: float
    offline_tokens_per_s: float | None


LLAMA_8B = (4096, 14336, 32, 32, 8, 128256)
LLAMA_70B = (8192, 28672, 80, 64, 8, 128256)
QWEN3_30B = (2048, 6144, 48, 32, 4, 151936)
VLLM = {
    (LLAMA_8B, None, "auto", 1): VllmFigures(
        version="0.26.0",
        machine="one NVIDIA H200",
        decode_ms={
            (1, 1024): 4.86,
            (8, 1024): 5.21,
            (32, 1024): 6.29,
            (64, 1024): 7.63,
            (128, 1024): 10.57,
            (256, 1024): 17.65,
            (32, 8192): 12.84,
        },
        prefill_ms={512: 14.9, 2048: 49.6, 8192: 210.9, 32768: 1178.0},
        saturated_tokens_per_s=43_300.0,
        offline_tokens_per_s=36_262.0,
    ),
    (LLAMA_8B, "fp8", "auto", 1): VllmFigures(
        version="0.26.0",
        machine="one NVIDIA H200",
        decode_ms={(1, 1024): 3.50, (32, 1024): 5.35, (128, 1024): 9.07, (256, 1024): 15.76},
        prefill_ms={512: 13.3, 2048: 34.6, 8192: 146.8},
        saturated_tokens_per_s=66_278.0,
        offline_tokens_per_s=None,
    ),
    (LLAMA_8B, "fp8", "fp8", 1): VllmFigures(
        version="0.26.0",
        machine="one NVIDIA H200",
        decode_ms={(32, 1024): 5.19, (256, 1024): 13.64, (32, 8192): 10.20},
        prefill_ms={},
        saturated_tokens_per_s=66_324.0,
        offline_tokens_per_s=None,
    ),
    (LLAMA_8B, None, "auto", 2): VllmFigures(
        version="0.26.0",
        machine="two NVIDIA H200",
        decode_ms={(1, 1024): 3.50, (32, 1024): 4.29, (128, 1024): 6.60},
        prefill_ms={2048: 34.4, 8192: 127.7},
        saturated_tokens_per_s=72_526.0,
        offline_tokens_per_s=None,
    ),
    (QWEN3_30B, None, "auto", 1): VllmFigures(
        version="0.26.0",
        machine="one NVIDIA H200",
        decode_ms={(1, 1024): 4.14, (8, 1024): 9.25, (32, 1024): 16.35, (128, 1024): 21.26, (256, 1024): 26.51},
        prefill_ms={512: 25.3, 2048: 55.2, 8192: 155.6},
        saturated_tokens_per_s=69_671.0,
        offline_tokens_per_s=None,
    ),
    (QWEN3_30B, "fp8", "auto", 1): VllmFigures(
        version="0.26.0",
        machine="one NVIDIA H200",
        decode_ms={(1, 1024): 4.29, (32, 1024): 5.92, (128, 1024): 9.44},
        prefill_ms={2048: 69.6},
        saturated_tokens_per_s=88_157.0,
        offline_tokens_per_s=None,
    ),
    (LLAMA_70B, None, "auto", 4): VllmFigures(
        version="0.26.0",
        machine="four NVIDIA H200",
        decode_ms={(1, 1024): 12.43, (32, 1024): 14.26, (128, 1024): 18.98},
        prefill_ms={2048: 143.7, 8192: 578.5},
        saturated_tokens_per_s=15_036.0,
        offline_tokens_per_s=None,
    ),
}
"""By dimensions (hidden size, intermediate size, layers, heads, KV heads and vocabulary), --quantization,
--kv-cache-dtype and --tensor-parallel-size; in bf16 with random weights."""


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """The experts of all layers of a mixture. num_params, num_bytes: of all; num_experts, top_k: of a layer."""

    num_experts: int
    top_k: int
    num_params: int
    num_bytes: int

    def likely(self, batch: int) -> float:
        """How many of a layer a batch chooses if each token takes any with the same chance."""
        return self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** batch)

    def read_bytes(self, chosen: float) -> float:
        """Bytes of so many experts of each layer."""
        return self.num_bytes * chosen / self.num_experts


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder. `read_params`: the weights that every step reads completely, so without experts, and without the
    embedding table unless it is also the output layer; `read_bytes`: of them, as they are stored. `token_params`: those
    that every token of a prompt is multiplied with, its experts included. `windows`: how far back each layer looks."""

    dims: tuple[int, ...]
    windows: tuple[int | None, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    read_params: int
    read_bytes: int
    token_params: int
    output_params: int
    vllm: VllmFigures | None = field(default=None)
    experts: ExpertsShape | None = None

    def step_bytes(self, batch: int, sequence_bytes: float, chosen: float | None = None) -> float:
        """Bytes that a decode step must read: the weights once, of experts those that are chosen, and the KV of every
        sequence, of `sequence_bytes` each. chosen: experts of each layer; None: as many as are likely."""
        experts = 0.0
        if self.experts is not None:
            experts = self.experts.read_bytes(self.experts.likely(batch) if chosen is None else chosen)
        return self.read_bytes + experts + batch * sequence_bytes

    def prompt_flops(self, num_tokens: int) -> float:
        """Multiplications and additions of a prompt, with causal attention and only its last token's logits."""
        pairs = sum(_num_pairs(num_tokens, window) for window in self.windows)
        attention = 4 * self.num_heads * self.head_dim * pairs
        return 2 * self.token_params * num_tokens + attention + 2 * self.output_params


def _num_pairs(num_tokens: int, window: int | None) -> int:
    """How many keys all of a prompt's tokens attend to together."""
    reach = min(num_tokens, window or num_tokens)
    return reach * (reach + 1) // 2 + (num_tokens - reach) * reach


def kv_bytes(layout: KvLayout, context: float) -> float:
    """Bytes of KV that the first rank reads for a sequence of that length: of layers with a window, no more than it."""
    held = layout.ranks[0]
    return sum(
        (min(held.head_end, layer.num_kv_heads) - min(held.head_start, layer.num_kv_heads))
        * layer.head_bytes(1)
        * min(context, layer.sliding_window or context)
        for layer in layout.layers[held.layer_start : held.layer_end]
    )


def shape_of(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    served: nn.Module | None = None,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    num_ranks: int = 1,
    windows: Sequence[int | None] = (),
) -> ModelShape:
    """The shape of the checkpoint's model, built on the meta device; of several ranks, what each has of it. `dtype`: of
    activations; vLLM's figures are for bfloat16. served: the model as it is served, if it is quantized or divided.
    windows: of its layers; empty: none has one."""
    config = copy.deepcopy(checkpoint.config)  # transformers writes to it
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    text = config.get_text_config()
    heads = int(text.num_attention_heads)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    layers = int(text.num_hidden_layers)
    dims = (text.hidden_size, text.intermediate_size, layers, heads, kv_heads, text.vocab_size)
    output = model.get_output_embeddings().weight.numel()
    total = sum(weight.numel() for weight in model.parameters())
    untied_table = 0 if _tied(model) else model.get_input_embeddings().weight.numel()
    read_bytes = (total - untied_table) * dtype.itemsize
    if served is not None:
        tables = [module.weight.nbytes for module in served.modules() if isinstance(module, nn.Embedding)]
        read_bytes = sum(weight.nbytes for weight in served.parameters()) - (0 if _tied(model) else sum(tables))
        read_bytes += packed_bytes(served)
    experts = _experts(model, served, dtype, text)
    num_experts_params, num_active_params = 0, 0
    if experts is not None:
        num_experts_params = experts.num_params
        num_active_params = num_experts_params * experts.top_k // experts.num_experts
        read_bytes -= experts.num_bytes
    read_params = total - untied_table - num_experts_params
    return ModelShape(
        dims=dims,
        windows=tuple(windows) or (None,) * layers,
        num_heads=heads // num_ranks,
        num_kv_heads=max(1, kv_heads // num_ranks),
        head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
        read_params=read_params,
        read_bytes=read_bytes,
        token_params=(read_params - output + num_active_params) // num_ranks,
        output_params=output // num_ranks,
        vllm=VLLM.get((dims, quantization, kv_cache_dtype, num_ranks)) if dtype == torch.bfloat16 else None,
        experts=experts,
    )


def _experts(model: nn.Module, served: nn.Module | None, dtype: torch.dtype, text: Any) -> ExpertsShape | None:
    """None: the model has none."""
    own = [weight for weight in model.parameters() if weight.ndim == 3]
    if not own:
        return None
    num_params = sum(weight.numel() for weight in own)
    stored = [weight for weight in served.parameters() if weight.ndim == 3] if served is not None else []
    num_bytes = sum(weight.nbytes for weight in stored) or num_params * dtype.itemsize
    return ExpertsShape(own[0].shape[0], text.num_experts_per_tok, num_params, num_bytes)


def _tied(model: Any) -> bool:
    table: nn.Parameter = model.get_input_embeddings().weight
    return model.get_output_embeddings().weight is table
