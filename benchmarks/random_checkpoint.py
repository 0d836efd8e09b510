"""Writes a checkpoint with random weights in the shape of a real model, as downloaded: config, shards, tokenizer."""

from __future__ import annotations

import itertools
import shutil
import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.model.load.checkpoint import Checkpoint
from engine.model.load.skeleton import build_skeleton, fill_with_dummies, move_empty

SHAPES = Path(__file__).parent / "models"
_SHARD = "5GB"


def write_checkpoint(shape: str, folder: Path) -> None:
    """Write a checkpoint with the shape of that folder in `benchmarks/models`, in its own dtype, unless it exists."""
    if (folder / "model.safetensors.index.json").exists() or (folder / "model.safetensors").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    config = Checkpoint.open(SHAPES / shape).config
    model = build_skeleton(config, config.dtype, "sdpa")
    move_empty(model, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    fill_with_dummies(model)
    model.save_pretrained(folder, max_shard_size=_SHARD)
    shutil.copy(SHAPES / shape / "config.json", folder)
    _tokenizer(config.vocab_size).save_pretrained(folder)


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
