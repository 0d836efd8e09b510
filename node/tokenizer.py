"""A model's tokenizer and chat template, as they are sent to routers, which need no model folder and run none of its
code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from engine.checkpoint import why_no_tokenizer
from engine.model.errors import UnsupportedModel
from node.describe import TokenizerFiles

__all__ = ["TokenizerFiles", "read_tokenizer"]


def read_tokenizer(path: Path) -> TokenizerFiles:
    """The tokenizer of the checkpoint in `path`, converted to a fast one if necessary. Raises UnsupportedModel."""
    if problem := why_no_tokenizer(path):  # for some models, transformers would otherwise make an empty tokenizer
        raise UnsupportedModel(f"{path}: {problem}")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the library raises that itself, and others where transformers does not expect a value
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UnsupportedModel(f"{path}: the tokenizer cannot be loaded: {reason}") from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UnsupportedModel(f"{path}: {type(tokenizer).__name__} has no fast form (tokenizer.json)")
    return TokenizerFiles(
        json=backend.to_str().encode(),
        chat_template=_chat_template(tokenizer.chat_template),
        special_tokens={name: str(token) for name, token in tokenizer.special_tokens_map.items() if _is_text(token)},
        eos_token_id=tokenizer.eos_token_id,
    )


def _chat_template(template: object) -> str:
    """The only template, or the default one of several."""
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) else ""


def _is_text(token: object) -> bool:
    """Excludes lists of additional special tokens, which chat templates do not use."""
    return not isinstance(token, (list, tuple))
