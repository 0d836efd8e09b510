"""Which folder `--model` means, what it lacks, and what its JSON files state, judged from its files before torch and
transformers are imported."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.node_info import GenerationDefaults
from baton.sampling import RANGES

EMBEDDED = {name: Path(__file__).parent / "checkpoints" / name for name in ("baton-tiny", "baton-tiny-moe")}
"""Models that come with baton: a dense one, and a mixture of experts."""
VOCABULARIES = ("tokenizer.json", "*.model", "vocab.json", "vocab.txt", "tekken.json", "*.tiktoken")
"""A tokenizer has at least one of these files."""

_GENERATION = "generation_config.json"
_COUNTS = {"top_k": RANGES["top_k"], "max_new_tokens": RANGES["max_tokens"]}
_DEFAULTS = _COUNTS | {name: RANGES[name] for name in ("temperature", "top_p", "min_p", "repetition_penalty")}
"""What is read of generation_config.json beside EOS ids, and the values that a request may have."""
_TOKEN_IDS = range(2**31)
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
    return read_json(file)


def read_json(file: Path) -> dict[str, Any]:
    """The object that the file holds. Raises ValueError, naming the file."""
    try:
        stated = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file.name} cannot be read: {error}") from error
    if not isinstance(stated, dict):
        raise ValueError(f"{file.name} holds no object")
    return stated


def read_generation_defaults(folder: Path, stated: Mapping[str, Any]) -> GenerationDefaults:
    """What generation_config.json states; EOS ids come from config.json, `stated`, if it states none. Raises ValueError
    for values with which no request could be run."""
    file = folder / _GENERATION
    generation = read_json(file) if file.is_file() else {}
    eos = generation.get("eos_token_id")
    ends = _token_ids(stated.get("eos_token_id") if eos is None else eos)
    return changed_defaults(
        GenerationDefaults(ends), {name: generation.get(name) for name in _DEFAULTS}, f"{_GENERATION}: "
    )


def changed_defaults(defaults: GenerationDefaults, given: Mapping[str, Any], where: str = "") -> GenerationDefaults:
    """The defaults with these in place of their own, by name. Raises ValueError, which begins with `where`, for values
    with which no request could be run, and for other names."""
    if unknown := given.keys() - _DEFAULTS.keys():
        raise ValueError(f"{where}there is no {min(unknown)!r}, only {', '.join(sorted(_DEFAULTS))}")
    return dataclasses.replace(defaults, **{name: _default(name, value, where) for name, value in given.items()})


def _token_ids(eos: object) -> tuple[int, ...]:
    """Without ids that no token has: some files say -1 for none."""
    ids: list[Any] = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(token) is int for token in ids):
        raise ValueError(f"eos_token_id must be a token id or a list of them, not {eos!r}")
    return tuple(token for token in ids if token in _TOKEN_IDS)


def _default(name: str, value: Any, where: str) -> Any:
    if value is None or (name == "top_k" and value == -1):  # vLLM's older way to say off
        return None
    valid = _DEFAULTS[name]
    if type(value) not in (int, float) or value not in valid or (name in _COUNTS and value % 1):
        raise ValueError(f"{where}{name} {valid.text}, not {value!r}")
    return int(value) if name in _COUNTS else value


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
