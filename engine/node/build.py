"""From settings to a loaded model, its pool and its engine, and what the node can say of them."""

from __future__ import annotations

import hashlib
import logging
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

import baton
from baton.layout import KvLayout, num_blocks_for
from baton.messages import GenerationDefaults, NodeInfo, NodeRole, TransportEndpoint
from engine.config import EngineConfig
from engine.engine import Engine
from engine.model import loader
from engine.model.attention import Probe, probe
from engine.model.runner import TorchModelRunner
from engine.node.settings import GIB, NodeSettings
from engine.node.tokenizer import TokenizerFiles, read_tokenizer

log = logging.getLogger(__name__)

_DTYPES = {"half": "float16", "float": "float32"}
_CPU_POOL_BYTES = GIB
_GPU_WORKSPACE_BYTES = GIB
"""Kept free for activations; logits come on top, see `_free_bytes`."""


@dataclass(frozen=True, slots=True)
class Built:
    """A model ready to serve. `pool_bytes`: the pool as [num_blocks, block_bytes], uint8; the runner owns it."""

    engine: Engine
    pool_bytes: Tensor
    layout: KvLayout
    device: torch.device
    served_model_name: str
    tokenizer: TokenizerFiles
    generation_defaults: GenerationDefaults

    @property
    def tokenizer_digest(self) -> str:
        """sha256, hex."""
        return hashlib.sha256(self.tokenizer.json).hexdigest()


def build(settings: NodeSettings) -> Built:
    """Load the model of `settings`. Takes seconds to minutes. Raises ValueError with one line for a person."""
    began = time.monotonic()
    if not sys.stderr.isatty():
        disable_progress_bar()  # type: ignore[no-untyped-call] # a log is no place for it
    device = _device(settings.device)
    if settings.cpu_threads is not None:
        torch.set_num_threads(settings.cpu_threads)
    torch.manual_seed(settings.seed)
    path = loader.resolve_model(settings.model, settings.revision)
    model = loader.load_model(path, _DTYPES.get(settings.dtype, settings.dtype), device)
    probed = probe(model)
    defaults = loader.generation_defaults(path)
    config = _engine_config(settings, path, probed, device, defaults.eos_token_ids)
    runner = TorchModelRunner(model, config, probed)
    built = Built(
        engine=Engine(config, runner),
        pool_bytes=runner.pool.as_bytes(),
        layout=runner.pool.layout(loader.fingerprint(path)),
        device=device,
        served_model_name=settings.served_model_name or settings.model,
        tokenizer=read_tokenizer(path),
        generation_defaults=defaults,
    )
    log.info(
        "model loaded model=%s device=%s dtype=%s threads=%d max_model_len=%d kv_blocks=%d kv_gib=%.2f seconds=%.1f",
        built.served_model_name,
        device,
        built.layout.dtype,
        torch.get_num_threads(),
        config.max_model_len,
        config.num_blocks - 1,
        built.pool_bytes.nbytes / GIB,
        time.monotonic() - began,
    )
    return built


def new_incarnation() -> str:
    return uuid.uuid4().hex[:16]


def describe(
    settings: NodeSettings, role: NodeRole, built: Built, incarnation: str, endpoint: TransportEndpoint
) -> NodeInfo:
    """What the node says of itself, but for its address."""
    config, tokenizer = built.engine.config, built.tokenizer
    return NodeInfo(
        role=role,
        incarnation=incarnation,
        node_id=settings.name(role),
        address="",
        served_model_name=built.served_model_name,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        num_blocks=built.engine.blocks.num_total,
        layout=built.layout,
        endpoints=(endpoint,),
        tokenizer_digest=built.tokenizer_digest,
        chat_template=tokenizer.chat_template,
        special_tokens=tokenizer.special_tokens,
        generation_defaults=built.generation_defaults,
        vocab_size=config.vocab_size,
        add_bos=tokenizer.add_bos,
        version=baton.__version__,
    )


def count_blocks(engine: Engine) -> dict[str, int]:
    """KV blocks by state, for metrics. Engine's thread only."""
    return {state.value: count for state, count in engine.blocks.counts_by_state().items()}


def _device(name: str) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ValueError("--device: cuda is not available on this machine")
    if name == "cpu" or not has_cuda:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())  # by number: transports ask which one


def _engine_config(
    settings: NodeSettings, path: Path, probed: Probe, device: torch.device, eos_token_ids: tuple[int, ...]
) -> EngineConfig:
    limit = loader.max_model_len(path)
    max_model_len = settings.max_model_len or limit
    if max_model_len > limit:
        raise ValueError(f"--max-model-len: {max_model_len} is beyond the model's context of {limit}")
    vocab_size = loader.vocab_size(path)
    return EngineConfig(
        num_blocks=_num_blocks(settings, max_model_len, probed, device, vocab_size) + 1,  # and the null block
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        block_size=settings.block_size,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
    )


def _num_blocks(
    settings: NodeSettings, max_model_len: int, probed: Probe, device: torch.device, vocab_size: int
) -> int:
    """Blocks that requests can have: as told, or as many as the memory holds and the node could ever fill at once."""
    if settings.num_gpu_blocks_override is not None:
        return settings.num_gpu_blocks_override
    block_bytes = probed.shape.block_bytes(settings.block_size)
    if settings.kv_cache_memory_bytes is not None:
        return settings.kv_cache_memory_bytes // block_bytes
    if device.type == "cuda":
        return _free_bytes(settings, vocab_size) // block_bytes
    fillable = settings.max_num_seqs * num_blocks_for(max_model_len, settings.block_size)
    return min(_CPU_POOL_BYTES // block_bytes, fillable)


def _free_bytes(settings: NodeSettings, vocab_size: int) -> int:
    """What --gpu-memory-utilization leaves for the pool, with the model loaded. It is this process's share: what others
    hold on the same GPU counts only where it leaves less."""
    free, total = torch.cuda.mem_get_info()
    logits = settings.max_num_seqs * vocab_size * 4 * 4  # fp32: as computed, adjusted, sorted, and their probabilities
    share = int(total * settings.gpu_memory_utilization) - torch.cuda.memory_reserved()
    budget = min(share, free) - _GPU_WORKSPACE_BYTES - logits
    if budget <= 0:
        raise ValueError(f"--gpu-memory-utilization: {settings.gpu_memory_utilization} leaves no memory for KV blocks")
    return budget
