"""Finds a checkpoint, loads it, and reads what its files say beside the weights."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from baton.messages import GenerationDefaults
from engine.checkpoint import local_folder, why_no_checkpoint, why_no_weights
from engine.model import rope
from engine.model.attention import IMPLEMENTATION
from engine.model.errors import ModelNotFound, UnsupportedModel
from engine.model.memory import GIB
from engine.model.progress import told
from engine.model.skeleton import build_skeleton, fill_with_dummies, move_empty
from engine.model.weights import NotDirect, fill, match, stored_dtype, stored_weights

log = logging.getLogger(__name__)

LoadFormat = Literal["auto", "safetensors", "dummy"]
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def resolve_model(name: str, revision: str | None = None) -> Path:
    """The folder of a model: an embedded one, a folder, or a hub id (downloaded once; from the cache alone when
    HF_HUB_OFFLINE is set). Raises ModelNotFound."""
    folder = local_folder(name)
    if folder is not None:
        if problem := why_no_checkpoint(folder):
            raise ModelNotFound(f"--model {name}: {problem}")
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_HUB_FILES))
    except (OSError, ValueError) as error:  # what the hub's errors derive from
        reason = str(error).splitlines()[0]
        raise ModelNotFound(f"--model {name} is neither a folder nor to be had from the hub: {reason}") from error


def load_model(
    path: Path, dtype: str = "auto", device: str | torch.device = "cpu", load_format: LoadFormat = "auto"
) -> PreTrainedModel:
    """The checkpoint's model class with paged attention, in eval mode, on the device.

    dtype: "auto" (the checkpoint's own), "float32", "float16" or "bfloat16"; on a CPU always float32, in which exact
    ties between the two best logits do not occur. load_format: "safetensors" takes the files' tensors as they are,
    straight to the device; "auto" does so, too, and leaves to transformers what it would have to convert; "dummy" makes
    random weights and needs no files but config.json. Code that comes with a checkpoint is never run. Raises
    UnsupportedModel.
    """
    device = torch.device(device)
    if dtype != "auto" and dtype not in _DTYPES:
        raise ValueError(f"--dtype must be auto, {', '.join(_DTYPES)}, not {dtype}")
    chosen = torch.float32 if device.type == "cpu" else _DTYPES.get(dtype)
    try:
        return _load(path, chosen, device, load_format)
    except UnsupportedModel:
        raise
    except (ValueError, KeyError, OSError, ImportError) as error:
        bypassed = isinstance(error, KeyError) and error.args == (IMPLEMENTATION,)
        reason = "its class has attention functions of its own" if bypassed else str(error)
        raise UnsupportedModel(f"{path} cannot be loaded: {reason}") from error


def _load(path: Path, dtype: torch.dtype | None, device: torch.device, load_format: LoadFormat) -> PreTrainedModel:
    """dtype: None for the checkpoint's own."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    if load_format == "dummy":
        with told(str(path)):
            return _load_dummy(config, dtype, device)
    if problem := why_no_weights(path):
        raise UnsupportedModel(f"{path}: {problem}")
    try:
        return _load_directly(path, config, dtype, device)
    except NotDirect as reason:
        if load_format == "safetensors":
            raise UnsupportedModel(f"{path} cannot be loaded with --load-format safetensors: {reason}") from reason
        log.info("weights go through transformers: %s", reason)
    with told(str(path)):
        return _load_through_transformers(path, dtype, device)


def _load_directly(path: Path, config: Any, dtype: torch.dtype | None, device: torch.device) -> PreTrainedModel:
    """Raises NotDirect."""
    began = time.monotonic()
    stored = stored_weights(path, config)
    model = build_skeleton(config, dtype or config.dtype or stored_dtype(stored), IMPLEMENTATION)
    matched = match(model, stored)
    move_empty(model, device)
    num_bytes = fill(matched, str(path))
    seconds = time.monotonic() - began
    log.info("weights read gib=%.2f seconds=%.2f gib_per_s=%.2f", num_bytes / GIB, seconds, num_bytes / GIB / seconds)
    return model


def _load_dummy(config: Any, dtype: torch.dtype | None, device: torch.device) -> PreTrainedModel:
    model = build_skeleton(config, dtype or config.dtype or torch.bfloat16, IMPLEMENTATION)
    move_empty(model, device)
    fill_with_dummies(model)
    log.warning("weights are random: --load-format dummy")
    return model


def _load_through_transformers(path: Path, dtype: torch.dtype | None, device: torch.device) -> PreTrainedModel:
    auto_class: Any = AutoModelForCausalLM
    model, info = auto_class.from_pretrained(
        path,
        dtype=dtype or "auto",
        attn_implementation=IMPLEMENTATION,
        trust_remote_code=False,
        local_files_only=True,
        output_loading_info=True,
    )
    if missing := sorted(info["missing_keys"]):
        raise UnsupportedModel(f"{path} lacks {len(missing)} of the model's weights, {missing[0]} for one")
    # Moved as a whole: from_pretrained places weights on a device itself only with the accelerate package.
    loaded: PreTrainedModel = model.to(device).eval().requires_grad_(False)
    return loaded


def max_model_len(path: Path) -> int:
    """The context length that the configuration states, in tokens; with dynamic NTK, as far as its factor carries."""
    config = _text_config(path)
    length = getattr(config, "max_position_embeddings", None)
    if not length:
        raise UnsupportedModel(f"{path}: config.json states no max_position_embeddings")
    return int(length * rope.context_factor(config))


def vocab_size(path: Path) -> int:
    return int(_text_config(path).vocab_size)


def generation_defaults(path: Path) -> GenerationDefaults:
    """What generation_config.json says; its EOS ids come from config.json when it is silent."""
    stated = _read_json(path / "generation_config.json")
    eos = stated.get("eos_token_id")
    if eos is None:
        eos = _read_json(path / "config.json").get("eos_token_id")
    return GenerationDefaults(
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        temperature=stated.get("temperature"),
        top_p=stated.get("top_p"),
        top_k=stated.get("top_k"),
        min_p=stated.get("min_p"),
        repetition_penalty=stated.get("repetition_penalty"),
        max_new_tokens=stated.get("max_new_tokens"),
    )


def fingerprint(path: Path, load_format: LoadFormat = "auto", max_model_len: int | None = None) -> str:
    """sha256, hex, that tells two models apart, in milliseconds for any size.

    Over config.json (without the version of the library that wrote it) and, per weight file in order of name: its
    size, its safetensors header (names, shapes, offsets), and 64 pieces of 4 KiB spread evenly over its data. Two
    fine-tunes of one model differ in nearly every weight, so in nearly every piece. Dummy weights follow from
    config.json. `max_model_len` counts where it decides about RoPE (see `engine.model.rope`).
    """
    config = _read_json(path / "config.json")
    stated = {key: value for key, value in config.items() if key != "transformers_version" and not key.startswith("_")}
    digest = hashlib.sha256(json.dumps(stated, sort_keys=True).encode())
    if max_model_len is not None:
        digest.update(rope.variant(_text_config(path), max_model_len).encode())
    if load_format == "dummy":
        digest.update(b"dummy")
        return digest.hexdigest()
    for file in sorted(path.glob("*.safetensors")):
        size = file.stat().st_size
        with file.open("rb") as data:
            header = data.read(int.from_bytes(data.read(8), "little"))
            digest.update(b"%s\0%d\0%s" % (file.name.encode(), size, header))
            for i in range(64):
                data.seek(len(header) + (size - len(header)) * i // 64)
                digest.update(data.read(4096))
    return digest.hexdigest()


def _text_config(path: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True).get_text_config()
    except (ValueError, KeyError, OSError) as error:
        raise UnsupportedModel(f"{path}: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    """The file's object; empty when there is no file."""
    if not file.is_file():
        return {}
    parsed: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return parsed
