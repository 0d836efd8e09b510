"""Writes a checkpoint with random weights in the shape of a real model, as downloaded: config, shards, tokenizer."""

from __future__ import annotations

import itertools
import json
import shutil
import string
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from engine.model.load.checkpoint import Checkpoint
from engine.model.load.skeleton import build_skeleton

SHAPES = Path(__file__).parent / "models"
_SHARD_BYTES = 5 * 10**9


def write_checkpoint(shape: str, folder: Path) -> None:
    """Write a checkpoint with the shape of that folder in `benchmarks/models`, in its own dtype, unless it exists. A
    shard at a time is in memory, so that a model may be larger than a GPU."""
    if (folder / SAFE_WEIGHTS_INDEX_NAME).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    config = Checkpoint.open(SHAPES / shape).config
    deviation = getattr(config.get_text_config(), "initializer_range", 0.02)
    tensors = _untied(build_skeleton(config, config.dtype, "sdpa"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shards = _shards({name: tensor.nbytes for name, tensor in tensors.items()})
    torch.manual_seed(0)
    file_of: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        values = {name: _random(name, tensors[name], deviation, device) for name in names}
        save_file(values, folder / file, metadata={"format": "pt"})
        file_of |= dict.fromkeys(names, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    shutil.copy(SHAPES / shape / "config.json", folder)
    _tokenizer(config.vocab_size).save_pretrained(folder)
    index = {"metadata": {"total_size": total}, "weight_map": file_of}
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index))  # last: without it, all is written again


def _untied(model: PreTrainedModel) -> dict[str, Tensor]:
    """The model's tensors by name, each once."""
    found: dict[str, Tensor] = {}
    seen = set[int]()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            found[name] = tensor
            seen.add(id(tensor))
    return found


def _shards(sizes: dict[str, int]) -> list[list[str]]:
    shards, room = list[list[str]](), 0
    for name, size in sizes.items():
        if size > room or not shards:
            shards.append([])
            room = _SHARD_BYTES
        shards[-1].append(name)
        room -= size
    return shards


def _random(name: str, like: Tensor, deviation: float, device: torch.device) -> Tensor:
    """Matrices are normal, norms one, biases zero."""
    if like.ndim > 1:
        return torch.empty(like.shape, dtype=like.dtype, device=device).normal_(0, deviation).cpu()
    return torch.full(like.shape, float(name.endswith("weight")), dtype=like.dtype)


def _tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with about that many tokens: all bytes, and combinations of two, three or more letters."""
    vocab = {byte: index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    words = list(string.ascii_letters)
    while len(vocab) < vocab_size:
        pairs = list(itertools.islice(itertools.product(words, string.ascii_letters), vocab_size - len(vocab)))
        words = [first + second for first, second in pairs]
        vocab.update({word: len(vocab) + index for index, word in enumerate(words)})
        merges += pairs
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = fast(tokenizer_object=backend, bos_token="a", eos_token="b")
    return tokenizer
