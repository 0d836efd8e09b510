"""Hugging Face models over paged KV blocks: the only place where torch and transformers meet the engine.

`load` finds a checkpoint, reads its files and loads its weights. `linear_method` chooses what computes linear layers.
`attention` puts paged attention under the unchanged model class, and refuses models that this would break. `fast`
replaces modules by fused ones. `parallel` divides a model among ranks, and `quantization` reads quantized weights.
`kv_pool` holds the memory of blocks, and `runner` computes batches.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any


def _hide_sklearn() -> None:
    """Hide scikit-learn from transformers: some versions import it, and SciPy, for assisted generation, which no node
    uses. The import takes 1.7 of the 14 s of a start (H200's host, transformers 5.17)."""
    modules: dict[str, Any] = sys.modules
    if "sklearn" in modules:
        return
    modules["sklearn"] = None  # importlib then finds no such module
    try:
        from transformers.utils.import_utils import is_sklearn_available

        is_sklearn_available()  # caches its result
    finally:
        del modules["sklearn"]


def _import_models() -> None:
    """Import `transformers.models` without its search of all models' 2,500 files for their exports: transformers has
    just made the same search, and caches the result. This saves 0.4 s of a start, or a second where opening a file is
    slow (H200's host)."""
    import transformers
    from transformers.utils import import_utils

    search = import_utils.define_import_structure
    if not hasattr(search, "cache_info"):
        return  # no result is cached
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
