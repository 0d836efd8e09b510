"""Writes a checkpoint with random weights in the shape of a real model, as downloaded: config, shards, tokenizer."""

from __future__ import annotations

import itertools
import json
import shutil
import string
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from io import RawIOBase
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from baton.process.resources import num_cpus
from engine.model.load.checkpoint import Checkpoint
from engine.model.load.skeleton import build_skeleton

SHAPES = Path(__file__).parents[1] / "models"
_SHARD_BYTES = 5 * 10**9
_PIECE_BYTES = 64 * 2**20
_MOST_THREADS = 16
_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
"""By their names in safetensors files."""


def write_checkpoint(shape: str, folder: Path) -> None:
    """Write a checkpoint with the shape of that folder in `benchmarks/models`, in its own dtype, unless it exists.
    Several shards are written at a time, and a tensor of each is in memory, so that a model may be larger than a
    GPU."""
    if (folder / SAFE_WEIGHTS_INDEX_NAME).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    config = Checkpoint.open(SHAPES / shape).config
    deviation = getattr(config.get_text_config(), "initializer_range", 0.02)
    tensors = _untied(build_skeleton(config, config.dtype, "sdpa"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shards = _shards({name: tensor.nbytes for name, tensor in tensors.items()})
    files = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    with ThreadPoolExecutor(min(_MOST_THREADS, num_cpus())) as threads:
        written = [
            threads.submit(_write_shard, folder / file, {name: tensors[name] for name in names}, deviation, device, i)
            for i, (file, names) in enumerate(zip(files, shards, strict=True))
        ]
        for shard in written:
            shard.result()
    total = sum(tensor.nbytes for tensor in tensors.values())
    shutil.copy(SHAPES / shape / "config.json", folder)
    _tokenizer(config.vocab_size).save_pretrained(folder)
    file_of = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": file_of}
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index))  # last: without it, all is written again


def _write_shard(path: Path, tensors: Mapping[str, Tensor], deviation: float, device: torch.device, seed: int) -> None:
    """Write random values for these tensors piece by piece: a library that writes a file takes all of it at once."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, like in tensors.items():
        begin, end = end, end + like.nbytes
        header[name] = {"dtype": _DTYPES[like.dtype], "shape": list(like.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    generator = torch.Generator(device).manual_seed(seed)
    host = torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    with path.open("wb", buffering=0) as file:
        _write(file, len(encoded).to_bytes(8, "little") + encoded)
        for name, like in tensors.items():
            values: Any = _random(name, like, deviation, generator).view(-1).view(torch.uint8)
            for piece in values.split(_PIECE_BYTES):
                _write(file, host[: len(piece)].copy_(piece).numpy().data)


def _write(file: RawIOBase, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:  # a call writes 2 GiB at most
        left = left[file.write(left) :]


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


def _random(name: str, like: Tensor, deviation: float, generator: torch.Generator) -> Tensor:
    """Matrices are normal, norms one, biases zero."""
    if like.ndim > 1:
        empty = torch.empty(like.shape, dtype=like.dtype, device=generator.device)
        return empty.normal_(0, deviation, generator=generator)
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
