"""The layout of a node's KV, which all its ranks know, and the fingerprint of its weights."""

from __future__ import annotations

import dataclasses

from baton.layout import KvLayout, LayerKv
from engine.model.load.checkpoint import Checkpoint
from engine.model.parallel.sharding import kv_slice
from engine.model.parallel.stages import Stage
from engine.model.quantization import stated_quantization
from node.settings import NodeSettings


def layout_of(
    settings: NodeSettings, checkpoint: Checkpoint, kv: tuple[LayerKv, ...], groups: tuple[tuple[int, ...], ...]
) -> KvLayout:
    """The layout of the whole model's blocks, and of the part of them that each rank has. kv, groups: of
    `node.ranks.part.Part`."""
    fingerprint = fingerprint_of(settings, checkpoint)
    if settings.num_ranks == 1:
        return KvLayout(kv, settings.block_size, fingerprint, groups=groups)
    text = checkpoint.config.get_text_config()
    size, num_stages = settings.tensor_parallel_size, settings.pipeline_parallel_size
    held = tuple(kv_slice(text, i, size, Stage(stage, num_stages)) for stage in range(num_stages) for i in range(size))
    num_heads = max(rank.head_end for rank in held)
    layers = tuple(dataclasses.replace(layer, num_kv_heads=num_heads) for layer in kv)
    return KvLayout(layers, settings.block_size, fingerprint, held, groups)


def fingerprint_of(settings: NodeSettings, checkpoint: Checkpoint) -> str:
    """The fingerprint of the weights as they are served."""
    own = settings.quantization if stated_quantization(checkpoint.config) is None else None
    is_dummy, max_model_len = settings.load_format == "dummy", settings.max_model_len or checkpoint.max_model_len
    return checkpoint.fingerprint(dummy=is_dummy, max_model_len=max_model_len, quantization=own)
