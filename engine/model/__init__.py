"""Hugging Face models over paged KV blocks: the only place where torch and transformers meet the engine.

`checkpoint` finds a checkpoint and reads what its files say, `loader` loads its weights, `linear_method` says what
computes linear layers, `attention` puts paged attention under the unchanged model class and refuses models that this
would get wrong, `fast` makes modules faster, `kv_pool` holds the blocks' memory, `runner` computes batches.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any


def _hide_sklearn() -> None:
    """Have transformers believe that scikit-learn is not there, where it is: some versions load it, and SciPy, for
    assisted generation, which no node does. That is 1.7 s of a start of 14 (H200's host, transformers 5.17)."""
    modules: dict[str, Any] = sys.modules
    if "sklearn" in modules:
        return
    modules["sklearn"] = None  # what importlib takes for "cannot be found"
    try:
        from transformers.utils.import_utils import is_sklearn_available

        is_sklearn_available()  # which keeps its answer
    finally:
        del modules["sklearn"]


def _import_models() -> None:
    """`transformers.models`, without its search of the 2,500 files of all models for what they export: transformers
    has just made the same one for itself, and keeps the answer. That is 0.4 s of a start, and a second where opening a
    file is slow (H200's host)."""
    import transformers
    from transformers.utils import import_utils

    search = import_utils.define_import_structure
    if not hasattr(search, "cache_info"):
        return  # no answer is kept
    folder, prefix = Path(transformers.__file__).parent / "models", "models."
    exports = {
        backends: {module.removeprefix(prefix): names for module, names in modules.items() if module.startswith(prefix)}
        for backends, modules in search(folder, prefix="models").items()
    }

    def answer(path: str, *options: Any, **named: Any) -> Any:
        return exports if path == str(folder / "__init__.py") else search(path, *options, **named)

    import_utils.define_import_structure = answer  # for this one import
    try:
        importlib.import_module("transformers.models")
    finally:
        import_utils.define_import_structure = search


_hide_sklearn()
_import_models()
