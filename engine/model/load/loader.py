"""Loads a checkpoint's weights into its model class."""

from __future__ import annotations

import logging
import time
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.checkpoint import why_no_weights
from engine.model.attention import IMPLEMENTATION
from engine.model.errors import UnsupportedModel
from engine.model.linear_method import choose_quantization, create_weights, process_weights_after_loading
from engine.model.load.checkpoint import Checkpoint
from engine.model.load.progress import told
from engine.model.load.skeleton import build_skeleton, fill_with_dummies, move_empty
from engine.model.load.weights import NotDirect, fill, match, stored_dtype, stored_weights
from engine.model.memory import GIB

log = logging.getLogger(__name__)

LoadFormat = Literal["auto", "safetensors", "dummy"]
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def load_model(
    checkpoint: Checkpoint, dtype: str = "auto", device: str | torch.device = "cpu", load_format: LoadFormat = "auto"
) -> PreTrainedModel:
    """The checkpoint's model class with paged attention, in eval mode, on the device.

    dtype: "auto" (the checkpoint's own), "float32", "float16" or "bfloat16"; on a CPU always float32, in which exact
    ties between the two best logits do not occur. load_format: "safetensors" takes the files' tensors as they are,
    straight to the device; "auto" does so, too, but leaves a checkpoint that needs conversion to transformers; "dummy"
    makes random weights and needs no files but config.json. Code that comes with a checkpoint is never run. Raises
    UnsupportedModel.
    """
    device = torch.device(device)
    if dtype != "auto" and dtype not in _DTYPES:
        raise ValueError(f"--dtype must be auto, {', '.join(_DTYPES)}, not {dtype}")
    chosen = torch.float32 if device.type == "cpu" else _DTYPES.get(dtype)
    try:
        return _load(checkpoint, chosen, device, load_format)
    except UnsupportedModel:
        raise
    except (ValueError, KeyError, OSError, ImportError) as error:
        bypassed = isinstance(error, KeyError) and error.args == (IMPLEMENTATION,)
        reason = "its class has attention functions of its own" if bypassed else str(error)
        raise UnsupportedModel(f"{checkpoint.path} cannot be loaded: {reason}") from error


def _load(
    checkpoint: Checkpoint, dtype: torch.dtype | None, device: torch.device, load_format: LoadFormat
) -> PreTrainedModel:
    """dtype: None for the checkpoint's own."""
    path = checkpoint.path
    if load_format == "dummy":
        with told(str(path)):
            return _load_dummy(checkpoint, dtype, device)
    if problem := why_no_weights(path):
        raise UnsupportedModel(f"{path}: {problem}")
    try:
        return _load_directly(checkpoint, dtype, device)
    except NotDirect as reason:
        if load_format == "safetensors":
            raise UnsupportedModel(f"{path} cannot be loaded with --load-format safetensors: {reason}") from reason
        log.info("weights go through transformers: %s", reason)
    with told(str(path)):
        return _load_through_transformers(checkpoint, dtype, device)


def _load_directly(checkpoint: Checkpoint, dtype: torch.dtype | None, device: torch.device) -> PreTrainedModel:
    """Raises NotDirect."""
    began = time.monotonic()
    config = checkpoint.config
    quantization = choose_quantization(config)
    if quantization is None:
        raise NotDirect("its weights are quantized")
    stored = stored_weights(checkpoint)
    model = build_skeleton(config, dtype or config.dtype or stored_dtype(stored), IMPLEMENTATION)
    create_weights(model, quantization)
    matched = match(model, stored)
    move_empty(model, device)
    num_bytes = fill(matched, str(checkpoint.path))
    process_weights_after_loading(model, quantization)
    seconds = time.monotonic() - began
    log.info("weights read gib=%.2f seconds=%.2f gib_per_s=%.2f", num_bytes / GIB, seconds, num_bytes / GIB / seconds)
    return model


def _load_dummy(checkpoint: Checkpoint, dtype: torch.dtype | None, device: torch.device) -> PreTrainedModel:
    config = checkpoint.config
    model = build_skeleton(config, dtype or config.dtype or torch.bfloat16, IMPLEMENTATION)
    move_empty(model, device)
    fill_with_dummies(model)
    log.warning("weights are random: --load-format dummy")
    return model


def _load_through_transformers(
    checkpoint: Checkpoint, dtype: torch.dtype | None, device: torch.device
) -> PreTrainedModel:
    auto_class: Any = AutoModelForCausalLM
    model, info = auto_class.from_pretrained(
        checkpoint.path,
        config=checkpoint.config,  # from_pretrained copies it
        dtype=dtype or "auto",
        attn_implementation=IMPLEMENTATION,
        trust_remote_code=False,
        local_files_only=True,
        output_loading_info=True,
    )
    if missing := sorted(info["missing_keys"]):
        raise UnsupportedModel(f"{checkpoint.path} lacks {len(missing)} of the model's weights, {missing[0]} for one")
    # Moved as a whole: from_pretrained places weights on a device itself only with the accelerate package.
    loaded: PreTrainedModel = model.to(device).eval().requires_grad_(False)
    return loaded
