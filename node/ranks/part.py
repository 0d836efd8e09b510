"""A rank's part of a node: its part of the model, and the sizes that are the same on all ranks.

limits -> load, probe -> profile, pool
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers.utils.logging import disable_progress_bar

from baton.kv_groups import group_layers
from baton.layout import QUANTIZED_TOKENS, KvLayout, LayerKv, as_quantized, num_blocks_for
from baton.process.resources import num_cpus
from engine.config import EngineConfig
from engine.model import fast
from engine.model.graphs import step_padding
from engine.model.load import loader
from engine.model.load.checkpoint import Checkpoint
from engine.model.memory import out_of_memory
from engine.model.parallel.data_parallel import ONE_NODE, DataParallel
from engine.model.parallel.part import RankPart
from engine.model.parallel.pipeline import Pipeline
from engine.model.probe import Probe, probe
from node.ranks import pool_size
from node.settings import GIB, NodeSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel  # models are imported after engine.model, which makes it faster

log = logging.getLogger(__name__)

_DTYPES = {"half": "float16", "float": "float32"}
_NULL_BLOCK = 1
"""The pool's block 0, which is never given to a request."""


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's part of the model, and what is the same on all ranks: the sizes, the KV that the layers of all stages
    keep for one rank's heads, and the KV groups of these layers. expert_exchange_s: see `DataParallel.exchange_s`; None
    on a GPU, and if a rank has all experts."""

    model: PreTrainedModel
    probed: Probe
    config: EngineConfig
    kv: tuple[LayerKv, ...]
    groups: tuple[tuple[int, ...], ...]
    expert_exchange_s: Callable[[], float] | None = None


def load_part(
    settings: NodeSettings, checkpoint: Checkpoint, pipeline: Pipeline, data: DataParallel = ONE_NODE
) -> Part:
    """Load what this rank computes; all ranks must call, also those of data parallel nodes. Raises ValueError, and
    RuntimeError when a rank is lost."""
    if not sys.stderr.isatty():
        disable_progress_bar()  # not useful in a log file
    device = device_of(settings, pipeline.everyone.rank)
    if settings.kv_cache_dtype != "auto":
        _require_fp8(device, settings.block_size)
    torch.set_num_threads(settings.cpu_threads or _share_of_threads(len(settings.host_ranks)))
    torch.manual_seed(settings.seed)
    limits = _limits(settings, checkpoint, device)
    experts = DataParallel(pipeline.peers) if data is ONE_NODE else data
    model, probed = _load(settings, checkpoint, device, limits.max_model_len, pipeline, experts)
    kv = pipeline.kv_of_all(probed.kv)
    groups = () if settings.disable_hybrid_kv_cache_manager else group_layers(kv)
    if not settings.disable_hybrid_kv_cache_manager:
        probed = dataclasses.replace(probed, groups=pipeline.stage.groups(groups))
        limits = _with_windows(limits, KvLayout(kv, limits.block_size, "", groups=groups).windows)
    config = _with_pool(settings, limits, model, probed, pipeline)
    is_measured = device.type == "cpu" and experts.everyone.size > 1
    return Part(model, probed, config, kv, groups, (lambda: experts.exchange_s) if is_measured else None)


def _share_of_threads(num_ranks: int) -> int:
    """A rank's share of those that torch would start, which heeds OMP_NUM_THREADS but not the quota of a container."""
    return max(1, min(torch.get_num_threads(), num_cpus()) // num_ranks)


def device_of(settings: NodeSettings, rank: int = 0) -> torch.device:
    """The device on which that rank computes. Each of a host's ranks has the GPU of its number on that host, which
    becomes this thread's current one. Raises ValueError."""
    has_cuda = torch.cuda.is_available()
    if settings.device == "cuda" and not has_cuda:
        raise ValueError("--device: cuda is not available on this machine")
    if settings.device == "cpu" or not has_cuda:
        return torch.device("cpu")
    if rank:
        torch.cuda.set_device(rank - settings.host_ranks.start)
    return torch.device("cuda", torch.cuda.current_device())  # with its index, which transports need


def dtype_of(settings: NodeSettings) -> str:
    """--dtype by torch's name, or auto."""
    return _DTYPES.get(settings.dtype, settings.dtype)


def _limits(settings: NodeSettings, checkpoint: Checkpoint, device: torch.device) -> EngineConfig:
    """The engine's sizes, with the smallest pool that works."""
    limit = checkpoint.max_model_len
    max_model_len = settings.max_model_len or limit
    if max_model_len > limit:
        raise ValueError(f"--max-model-len: {max_model_len} is beyond the model's context of {limit}")
    on_gpu = device.type == "cuda"
    overlaps = on_gpu or settings.pipeline_parallel_size > 1
    limits = EngineConfig(
        num_blocks=num_blocks_for(max_model_len, settings.block_size) + _NULL_BLOCK,
        max_model_len=max_model_len,
        vocab_size=checkpoint.vocab_size,
        eos_token_ids=checkpoint.generation_defaults.eos_token_ids,
        block_size=settings.block_size,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.batched_tokens(on_gpu),
        saturating_num_tokens=settings.saturating_num_tokens,
        async_scheduling=overlaps if settings.async_scheduling is None else settings.async_scheduling,
        num_stages=settings.pipeline_parallel_size,
        target_itl_s=settings.target_itl_s,
        max_logprobs=settings.most_logprobs(checkpoint.vocab_size),
    )
    if on_gpu and settings.captures_graphs:
        padding = step_padding(limits, settings.captured_prompt_tokens, settings.captured_mixed_tokens)
        limits = dataclasses.replace(limits, padding=padding)
    has_windows = getattr(checkpoint.config.get_text_config(), "sliding_window", None) is not None
    if settings.num_gpu_blocks_override is not None and not has_windows:
        # Report a pool that is too small now, and not after the weights are loaded, when it is known which layers have
        # a window.
        dataclasses.replace(limits, num_blocks=settings.num_gpu_blocks_override + _NULL_BLOCK)
    return limits


def _with_windows(limits: EngineConfig, windows: tuple[int | None, ...]) -> EngineConfig:
    """The sizes, with the smallest pool that works for tables of these groups. No block falls behind a window that is
    as long as the context."""
    shorter = tuple(window if window and window < limits.max_model_len else None for window in windows)
    limits = dataclasses.replace(limits, num_blocks=sys.maxsize, windows=shorter)
    return dataclasses.replace(limits, num_blocks=limits.most_blocks(limits.max_model_len) + _NULL_BLOCK)


def _load(
    settings: NodeSettings,
    checkpoint: Checkpoint,
    device: torch.device,
    max_model_len: int,
    pipeline: Pipeline,
    data: DataParallel,
) -> tuple[PreTrainedModel, Probe]:
    began = time.monotonic()
    with out_of_memory("--model: the weights do not fit the GPU"):
        model = loader.load_model(
            checkpoint,
            dtype_of(settings),
            device,
            settings.load_format,
            settings.quantization,
            part=RankPart(
                pipeline.peers,
                pipeline.stage,
                settings.enable_expert_parallel,
                None if settings.eplb is None else settings.eplb.num_redundant_experts,
                data,
            ),
        )
    weights = sum(p.nbytes for p in model.parameters())
    probed = probe(model, max_model_len)
    fast.apply(model, probed, max_model_len)
    if settings.kv_cache_dtype != "auto":
        probed = dataclasses.replace(probed, kv=tuple(map(as_quantized, probed.kv)))
    name = settings.model_name
    log.info(
        "model loaded model=%s device=%s dtype=%s threads=%d weights_gib=%.2f seconds=%.2f",
        name,
        device,
        str(model.dtype).removeprefix("torch."),
        torch.get_num_threads(),
        weights / GIB,
        time.monotonic() - began,
    )
    return model, probed


def _require_fp8(device: torch.device, block_size: int) -> None:
    """Raise ValueError if KV cannot be quantized there: Triton needs float8_e4m3fn, and pieces of blocks a size."""
    if block_size % QUANTIZED_TOKENS:
        raise ValueError(f"--block-size: must be a multiple of {QUANTIZED_TOKENS} with --kv-cache-dtype fp8")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise ValueError(f"--kv-cache-dtype: fp8 needs a GPU of compute capability 8.9 or more; {name} has less")


def _with_pool(
    settings: NodeSettings, limits: EngineConfig, model: PreTrainedModel, probed: Probe, pipeline: Pipeline
) -> EngineConfig:
    """`limits` with the pool's size: the one that is set, or what fits into the memory of every rank."""
    began = time.monotonic()
    num_blocks = pipeline.everyone.minimum(pool_size.num_blocks(settings, limits, model, probed, pipeline))
    log.info(
        "kv pool kv_blocks=%d kv_gib=%.2f dtype=%s windows=%s max_model_len=%d max_num_seqs=%d "
        "max_num_batched_tokens=%d seconds=%.2f",
        num_blocks,
        num_blocks * probed.block_bytes(settings.block_size) / GIB,
        probed.kv[0].dtype,
        ",".join(str(window or "none") for window in limits.windows),
        limits.max_model_len,
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
        time.monotonic() - began,
    )
    return dataclasses.replace(limits, num_blocks=num_blocks + _NULL_BLOCK)
