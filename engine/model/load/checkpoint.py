"""A checkpoint's folder: its configurations, parsed once, and what follows from its files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from baton.node_info import GenerationDefaults
from engine.checkpoint import local_folder, read_config, read_generation_defaults, why_no_checkpoint
from engine.model import rope
from engine.model.errors import ModelNotFound, UnsupportedModel
from engine.model.load.supported import auto_class_of, require_supported_config
from engine.model.safetensors_index import StoredTensor, read_stored, weight_files

_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_HUB_COPIES = ["original/*", "metal/*"]
"""Files that hold the same weights again, in their makers' own formats."""
_SAMPLES = 64
_SAMPLE_BYTES = 4096


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What a model is loaded from. Made by `find` or `open`; the files must not change while it is in use.

    stated: config.json, parsed. generation_defaults: what generation_config.json states. config: transformers' own
    object for config.json; copy it to build a model, since that writes to it.
    """

    path: Path
    stated: Mapping[str, Any]
    generation_defaults: GenerationDefaults
    config: Any

    @classmethod
    def find(cls, name: str, revision: str | None = None) -> Checkpoint:
        """The checkpoint of an embedded model, a folder, or a hub id (downloaded once; only from the cache when
        HF_HUB_OFFLINE is set). Raises ModelNotFound, UnsupportedModel."""
        return cls.open(_resolve(name, revision))

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """The checkpoint in a folder. Code that comes with it is never run. Raises UnsupportedModel."""
        try:
            stated = read_config(path)
            generation = read_generation_defaults(path, stated)
            config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        except (ValueError, KeyError, OSError) as error:
            raise UnsupportedModel(f"{path}: {error}") from error
        except Exception as error:  # of any kind, where transformers does not expect a value
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise UnsupportedModel(f"{path}: transformers cannot read its config.json: {reason}") from error
        auto_class_of(config)
        return cls(path, stated, generation, config)

    @property
    def text_config(self) -> Any:
        """The language model's part of `config`."""
        return self.config.get_text_config()

    @property
    def dtype(self) -> Any:
        """The torch dtype that the configuration states, or its language model's part alone (Qwen3-VL); None: none."""
        return self.config.dtype or self.text_config.dtype

    @property
    def max_model_len(self) -> int:
        """The context length that the configuration states, in tokens; with dynamic NTK or YaRN, with its factor.
        Raises UnsupportedModel when it states none."""
        length = getattr(self.text_config, "max_position_embeddings", None)
        if not length:
            require_supported_config(self.text_config)  # of recurrent layers, which need none, this says more
            raise UnsupportedModel(f"{self.path}: config.json states no max_position_embeddings")
        return rope.context_length(self.text_config, length)

    @property
    def vocab_size(self) -> int:
        return int(self.text_config.vocab_size)

    def also_ending_at(self, token: int | None) -> Checkpoint:
        """The checkpoint with one more EOS, that of its tokenizer: fine-tunes often have a generation_config.json that
        still states the base model's alone. vLLM ends answers at both, too (`update_from_generation_config` in
        vllm/sampling_params.py). None, or none of the model's tokens: as it is."""
        known = self.generation_defaults.eos_token_ids
        if token is None or token in known or token >= self.vocab_size:
            return self
        defaults = dataclasses.replace(self.generation_defaults, eos_token_ids=(*known, token))
        return dataclasses.replace(self, generation_defaults=defaults)

    @cached_property
    def weights(self) -> Mapping[str, StoredTensor]:
        """Where each tensor of its safetensors files lies, by name; empty without model.safetensors or an index. Raises
        UnsupportedModel for a file that is truncated or not safetensors."""
        return read_stored(weight_files(self.path))

    def fingerprint(
        self, *, dummy: bool = False, max_model_len: int | None = None, quantization: str | None = None
    ) -> str:
        """A SHA-256, in hex, that tells two models apart; takes milliseconds for any size.

        Over config.json (without the version of the library that wrote it) and, per weight file in order of name: its
        size, its safetensors header (names, shapes, offsets), and 64 spans of 4 KiB spread evenly over its data. Two
        fine-tunes of one model differ in nearly every weight, so in nearly every span. dummy: random weights, which
        follow from config.json. quantization: how the weights are quantized while they load. max_model_len: counts
        where it decides about RoPE (see `engine.model.rope`).
        """
        stated = {k: v for k, v in self.stated.items() if k != "transformers_version" and not k.startswith("_")}
        digest = hashlib.sha256(json.dumps(stated, sort_keys=True).encode())
        if max_model_len is not None:
            digest.update(rope.variant(self.text_config, max_model_len).encode())
        if quantization is not None:
            digest.update(quantization.encode())
        if dummy:
            digest.update(b"dummy")
            return digest.hexdigest()
        for file in sorted(self.path.glob("*.safetensors")):
            size = file.stat().st_size
            with file.open("rb") as data:
                header = data.read(int.from_bytes(data.read(8), "little"))
                digest.update(b"%s\0%d\0%s" % (file.name.encode(), size, header))
                for i in range(_SAMPLES):
                    data.seek(len(header) + (size - len(header)) * i // _SAMPLES)
                    digest.update(data.read(_SAMPLE_BYTES))
        return digest.hexdigest()


def _resolve(name: str, revision: str | None) -> Path:
    folder = local_folder(name)
    if folder is not None:
        if problem := why_no_checkpoint(folder):
            raise ModelNotFound(f"--model {name}: {problem}")
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_COPIES))
    except (OSError, ValueError) as error:  # base classes of the hub's errors
        reason = " ".join(str(error).split())  # the first line has no more than the status
        if isinstance(error, RepositoryNotFoundError):  # also of one that is private or gated
            reason += " (the environment variable HF_TOKEN is the token for it)"
        raise ModelNotFound(f"--model {name} is neither a folder nor to be had from the hub: {reason}") from error
