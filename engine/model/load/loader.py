"""Loads a checkpoint's weights into its model class."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from baton_kernels.packed_linear import has_bfloat16
from engine.checkpoint import why_no_weights
from engine.model.attention import IMPLEMENTATION, OWN_ATTENTION
from engine.model.errors import UnsupportedModel
from engine.model.linear_method import Quantization, Unquantized, create_weights, process_weights_after_loading
from engine.model.load.checkpoint import Checkpoint
from engine.model.load.placing import NotDirect, Placing, with_model_names
from engine.model.load.progress import Loaded, progress_logged
from engine.model.load.skeleton import build_skeleton, fill_with_dummies, in_parts, move_empty
from engine.model.load.supported import auto_class_of, require_supported_config
from engine.model.load.weights import fill, match, stored_dtype, stored_weights
from engine.model.memory import GIB
from engine.model.parallel.layers import connect
from engine.model.parallel.part import WHOLE_MODEL, RankPart
from engine.model.parallel.sharding import Place, Sharding, shard
from engine.model.parallel.stages import StageWeights, keep_stage
from engine.model.quantization import STORED, choose_quantization, is_leftover, stated_quantization
from engine.model.quantization.stored import is_unused
from engine.model.safetensors_index import StoredTensor

log = logging.getLogger(__name__)

LoadFormat = Literal["auto", "safetensors", "dummy"]
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def load_model(
    checkpoint: Checkpoint,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    load_format: LoadFormat = "auto",
    quantization: str | None = None,
    part: RankPart = WHOLE_MODEL,
) -> PreTrainedModel:
    """The checkpoint's model class with paged attention, in eval mode, on the device.

    dtype: "auto" (the checkpoint's own; on a CPU float32, which all processors have, and in which exact ties between
    the two best logits do not occur), "float32", "float16" (not on a CPU) or "bfloat16". load_format: "safetensors"
    takes the files' tensors as they are, straight to the device; "auto" does so, too, but leaves a checkpoint that
    needs conversion to transformers; "dummy" makes random weights and needs no files but config.json. quantization:
    None, the checkpoint's own; else how to quantize one that is not. part: the part of the model that this rank holds;
    all ranks must call. Code that comes with a checkpoint is never run. Raises UnsupportedModel, and ValueError for a
    dtype that cannot be had.
    """
    device = torch.device(device)
    if dtype != "auto" and dtype not in _DTYPES:
        raise ValueError(f"--dtype must be auto, {', '.join(_DTYPES)}, not {dtype}")
    chosen = _on_cpu(dtype) if device.type == "cpu" else _DTYPES.get(dtype)
    try:
        return _load(checkpoint, chosen, device, load_format, quantization, part)
    except UnsupportedModel:
        raise
    except (ValueError, KeyError, OSError, ImportError) as error:
        bypassed = isinstance(error, KeyError) and error.args == (IMPLEMENTATION,)
        reason = OWN_ATTENTION if bypassed else str(error)
        raise UnsupportedModel(f"{checkpoint.path} cannot be loaded: {reason}") from error


def _on_cpu(dtype: str) -> torch.dtype:
    if dtype == "float16":
        raise ValueError("--dtype: float16 is for GPUs; a CPU computes in float32 or bfloat16")
    if dtype == "bfloat16" and not has_bfloat16():
        log.warning("--dtype: bfloat16 may be slower than float32: this CPU has neither AVX512-BF16 nor AMX")
    return torch.bfloat16 if dtype == "bfloat16" else torch.float32


def _load(
    checkpoint: Checkpoint,
    dtype: torch.dtype | None,
    device: torch.device,
    load_format: LoadFormat,
    requested: str | None = None,
    part: RankPart = WHOLE_MODEL,
) -> PreTrainedModel:
    """dtype: None: the checkpoint's own."""
    path = checkpoint.path
    require_supported_config(checkpoint.text_config)
    quantization = choose_quantization(checkpoint.config, _weights_by_name(checkpoint), requested)
    if part.is_divided and quantization is None:
        raise UnsupportedModel(f"{path}: weights that are stored quantized in this form cannot be divided among ranks")
    if load_format == "dummy":
        with progress_logged(str(path)):
            return _load_dummy(checkpoint, quantization or Unquantized(), dtype, device, part)
    if problem := why_no_weights(path):
        raise UnsupportedModel(f"{path}: {problem}")
    try:
        if quantization is None:
            raise NotDirect("its weights are quantized in a way of their own")
        return _load_directly(checkpoint, quantization, dtype, device, part)
    except NotDirect as reason:
        if load_format == "safetensors":
            raise UnsupportedModel(f"{path} cannot be loaded with --load-format safetensors: {reason}") from reason
        if part.is_divided:
            raise UnsupportedModel(f"{path} cannot be divided among ranks: {reason}") from reason
        if isinstance(quantization, STORED):
            raise UnsupportedModel(f"{path}: {reason}") from reason  # transformers reads other forms of these formats
        why_not_direct = str(reason)
        log.info("weights go through transformers: %s", why_not_direct)
    with progress_logged(str(path)):
        model = _load_through_transformers(checkpoint, dtype, device, why_not_direct)
        if quantization is not None and requested is not None:
            process_weights_after_loading(model, quantization, model.dtype)
        return model


def _weights_by_name(checkpoint: Checkpoint) -> Mapping[str, StoredTensor]:
    """The files' tensors, as quantization looks for them. A model with a language model inside may call its layers
    otherwise than the files do (Gemma 3)."""
    config = checkpoint.config
    if checkpoint.text_config is config or stated_quantization(config) is None:
        return checkpoint.weights
    return with_model_names(checkpoint.weights, build_skeleton(config, torch.bfloat16, IMPLEMENTATION))


def _load_directly(
    checkpoint: Checkpoint,
    quantization: Quantization,
    dtype: torch.dtype | None,
    device: torch.device,
    part: RankPart = WHOLE_MODEL,
) -> PreTrainedModel:
    """Load a layer at a time, so that only one layer has its weights both as stored and as served. Raises NotDirect."""
    began = time.monotonic()
    config = checkpoint.config
    unquantized = isinstance(quantization, Unquantized)
    stored = {name: tensor for name, tensor in stored_weights(checkpoint).items() if unquantized or not is_unused(name)}
    dtype = dtype or checkpoint.dtype or stored_dtype(stored)
    model, sharding, weights = _skeleton(config, dtype, quantization, part)
    stored = weights.of(stored, Placing(model).name_of)
    if sharding is not None:
        shapes = {name: tensor.shape for name, tensor in with_model_names(stored, model).items()}
        sharding.follow(model, shapes, quantization)
    cut_of = sharding.cut_of if sharding is not None else lambda _: None
    matched = match(model, stored, cut_of)
    loaded = Loaded(sum(source.num_bytes for sources in matched.values() for source in sources))
    with progress_logged(str(checkpoint.path), loaded):
        for layer in [model] if unquantized else in_parts(model):
            own = layer.state_dict(keep_vars=True).values()
            move_empty(layer, device)
            fill([source for tensor in own for source in matched.pop(id(tensor), ())], loaded)
            process_weights_after_loading(model, quantization, dtype, layer)
    if sharding is not None:
        connect(model, sharding, part.group, part.experts)
    seconds = time.monotonic() - began
    rate = loaded.total / GIB / seconds
    log.info("weights read gib=%.2f seconds=%.2f gib_per_s=%.2f", loaded.total / GIB, seconds, rate)
    return model


def _skeleton(
    config: Any, dtype: torch.dtype, quantization: Quantization, part: RankPart
) -> tuple[PreTrainedModel, Sharding | None, StageWeights]:
    """This rank's part of the model, without weights; how its weights are sharded (None: they are whole); and which of
    the files' tensors its stage has."""
    model = build_skeleton(config, dtype, IMPLEMENTATION)
    part.require_possible(model)
    weights = keep_stage(model, part.stage)
    sharding = None
    if part.cuts_weights:
        groups = part.group, part.experts.everyone
        places = (Place(group.rank, group.size) for group in groups)
        whole, num_redundant = part.whole_experts, part.num_redundant_experts
        sharding = shard(
            model,
            *places,
            whole_experts=whole,
            num_redundant_experts=num_redundant,
            expert_block=quantization.expert_block,
        )
        quantization.divide(sharding.columns(*groups))
    create_weights(model, quantization)
    return model, sharding, weights


def _load_dummy(
    checkpoint: Checkpoint,
    quantization: Quantization,
    dtype: torch.dtype | None,
    device: torch.device,
    part: RankPart = WHOLE_MODEL,
) -> PreTrainedModel:
    config = checkpoint.config
    dtype = dtype or checkpoint.dtype or torch.bfloat16
    model, sharding, _ = _skeleton(config, dtype, quantization, part)
    move_empty(model, device)
    fill_with_dummies(model)
    for layer in in_parts(model):
        process_weights_after_loading(model, quantization, dtype, layer)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the freed memory of a layer as stored fits none of the next layer's tensors
    if sharding is not None:
        connect(model, sharding, part.group, part.experts)
    log.warning("weights are random: --load-format dummy")
    return model


def _load_through_transformers(
    checkpoint: Checkpoint, dtype: torch.dtype | None, device: torch.device, why_not_direct: str
) -> PreTrainedModel:
    try:
        model, info = auto_class_of(checkpoint.config).from_pretrained(
            checkpoint.path,
            config=checkpoint.config,  # from_pretrained copies it
            dtype=dtype or "auto",
            attn_implementation=IMPLEMENTATION,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, SafetensorError) as error:
        # Methods that this machine's device does not have, shapes that do not fit, files that are damaged.
        raise UnsupportedModel(f"{checkpoint.path} cannot be loaded: {why_not_direct}; {error}") from error
    if missing := sorted(info["missing_keys"]):
        raise UnsupportedModel(f"{checkpoint.path} lacks {len(missing)} of the model's weights, {missing[0]} for one")
    if leftover := sorted(filter(is_leftover, info["unexpected_keys"])):
        raise UnsupportedModel(f"{checkpoint.path}: nothing reads {leftover[0]}, of a quantized weight")
    # Moved as a whole: from_pretrained places weights on a device itself only with the accelerate package.
    loaded: PreTrainedModel = model.to(device).eval().requires_grad_(False)
    return loaded
