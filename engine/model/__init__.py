"""Hugging Face models over our KV blocks: the one place where torch and transformers meet the engine.

`loader` finds and loads a checkpoint, `attention` puts paged attention under the unchanged model class and refuses
models that this would get wrong, `kv_pool` holds the blocks' memory, `runner` computes batches.
"""

from __future__ import annotations

import sys
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


_hide_sklearn()
