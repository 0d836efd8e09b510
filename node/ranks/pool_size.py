"""How many KV blocks a node has: the number that is set, or what fits into memory."""

from __future__ import annotations

from transformers import PreTrainedModel

from baton.process.resources import memory_bytes
from engine.config import EngineConfig
from engine.model.graphs import decode_capture_sizes, num_logits_rows
from engine.model.memory import ProfiledMemory, kv_pool_bytes, num_kv_blocks, out_of_memory, profile
from engine.model.parallel.pipeline import ONE_STAGE, Pipeline, ProfilingPipeline
from engine.model.probe import Probe
from engine.model.runner import TorchModelRunner
from engine.model.warm_up import largest_steps, profile_config
from node.settings import CPU_POOL_BYTES, GIB, NodeSettings
from node.slots import slot_sizes

_CPU_POOL_SHARE = 0.25
"""Of the memory that the ranks of a host may use: there must be room for the weights, and for a peer's node."""
_GRAPHS_BYTES = GIB
"""Bytes kept free for CUDA graphs; if their logits take much, a quarter of this besides the logits."""


def num_blocks(
    settings: NodeSettings, limits: EngineConfig, model: PreTrainedModel, probed: Probe, pipeline: Pipeline = ONE_STAGE
) -> int:
    """Blocks for requests. On a GPU this always computes the largest steps, which also compiles their kernels; all
    ranks of a stage must call. Raises ValueError, naming the flag, if one request does not fit."""
    memory = _profile(model, probed, limits, pipeline) if model.device.type == "cuda" else None
    if settings.num_gpu_blocks_override is not None:
        return settings.num_gpu_blocks_override  # EngineConfig checks it
    block_bytes = probed.block_bytes(limits.block_size)
    logits_bytes = limits.vocab_size * model.dtype.itemsize
    pool_bytes, more_by = _pool_bytes(settings, limits, block_bytes, logits_bytes, memory)
    return num_kv_blocks(pool_bytes, block_bytes, limits, more_by)


def _pool_bytes(
    settings: NodeSettings, limits: EngineConfig, block_bytes: int, logits_bytes: int, memory: ProfiledMemory | None
) -> tuple[int, str]:
    """The bytes of the pool, and the flag that would enlarge it. On a CPU, at most what the node could ever fill.
    logits_bytes: those of one row."""
    requested = settings.kv_cache_memory_bytes
    if requested is not None:
        return requested, f"--kv-cache-memory-bytes ({requested})"
    if memory is not None:
        share = settings.gpu_memory_utilization
        graphs_bytes = graph_bytes(settings, limits, logits_bytes) if settings.captures_graphs else 0
        slots = slot_sizes(settings, block_bytes, on_gpu=True)
        num_slots = slots.num_slots + settings.num_outward_slots
        kept = graphs_bytes + num_slots * slots.part_blocks * block_bytes
        return kv_pool_bytes(memory, share, kept), f"--gpu-memory-utilization ({share:g})"
    fillable = limits.max_num_seqs * limits.most_blocks(limits.max_model_len)
    share = int(memory_bytes() * _CPU_POOL_SHARE) // len(settings.host_ranks)
    more_by = "--kv-cache-memory-bytes (unset: at most 1 GiB, and a quarter of the memory)"
    return min(CPU_POOL_BYTES, share, fillable * block_bytes), more_by


def graph_bytes(settings: NodeSettings, limits: EngineConfig, logits_bytes: int) -> int:
    """Bytes to keep free for the CUDA graphs of a node with these limits and their padding. Graphs of data parallel
    nodes have the rows of all nodes."""
    sizes = settings.cudagraph_capture_sizes or decode_capture_sizes(limits.max_num_seqs)
    return max(
        _GRAPHS_BYTES,
        _GRAPHS_BYTES // 4 * settings.data_parallel_size + num_logits_rows(sizes, limits.padding) * logits_bytes,
    )


def _profile(model: PreTrainedModel, probed: Probe, limits: EngineConfig, pipeline: Pipeline) -> ProfiledMemory:
    """Compute the largest steps over a few blocks, which stay allocated until another runner takes over the model. This
    is done as often as there are stages, so that the last time a stage also holds what it has sent for earlier
    steps."""
    with out_of_memory("--max-num-batched-tokens, --max-num-seqs: lower them, a step does not fit the GPU"):
        runner = TorchModelRunner(model, profile_config(limits), probed, pipeline=ProfilingPipeline(pipeline))

        def run() -> None:
            for chunks in largest_steps(limits) * pipeline.stage.size:
                runner.launch(chunks).wait()
                for chunk in chunks:
                    runner.forget(chunk.sequence)

        return profile(run, model.device, scratch_bytes=runner.pool.tensor.nbytes)
