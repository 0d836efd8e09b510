"""Which folder `--model` means, and what it lacks, judged from its files before torch and transformers are imported."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

EMBEDDED = {name: Path(__file__).parent / "checkpoints" / name for name in ("baton-tiny", "baton-tiny-moe")}
"""Models that come with baton: a dense one, and a mixture of experts."""
VOCABULARIES = ("tokenizer.json", "*.model", "vocab.json", "vocab.txt", "tekken.json", "*.tiktoken")
"""A tokenizer has at least one of these files."""

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)


def local_folder(name: str) -> Path | None:
    """The folder that `name` means, which may not exist; None: `name` is the id of a model on the hub. `/x`, `./x`,
    `../x`, `~/x` and `a/b/c` are not ids."""
    if name in EMBEDDED:
        return EMBEDDED[name]
    try:
        folder = Path(name).expanduser()
    except RuntimeError:  # `~name` of an unknown user
        return Path(name)
    return None if _HUB_ID.fullmatch(name) and not folder.is_dir() else folder


def read_config(folder: Path) -> dict[str, Any]:
    """The checkpoint's config.json, parsed. Raises ValueError with the reason why no model can be loaded from there."""
    if not folder.exists():
        raise ValueError("there is no such folder")
    if not folder.is_dir():
        raise ValueError("this is a file, not a checkpoint's folder")
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError("the folder has no config.json")
    try:
        stated = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"config.json cannot be read: {error}") from error
    if not isinstance(stated, dict):
        raise ValueError("config.json holds no object")
    return stated


def why_no_checkpoint(folder: Path) -> str | None:
    """Why no model can be loaded from there; None: no reason found so far."""
    try:
        read_config(folder)
    except ValueError as problem:
        return str(problem)
    return None


def has_tokenizer(folder: Path) -> bool:
    return any(next(folder.glob(name), None) for name in VOCABULARIES)


def why_no_tokenizer(folder: Path) -> str | None:
    return None if has_tokenizer(folder) else f"the folder has no tokenizer: none of {', '.join(VOCABULARIES)}"


def why_no_weights(folder: Path) -> str | None:
    return None if any(folder.glob("*.safetensors")) else "the folder has no safetensors weights"
