"""What a node's start does not wait for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
import engine.model.load.loader
from transformers.utils import is_sklearn_available
assert not is_sklearn_available(), "transformers will load scikit-learn"
assert "sklearn" not in sys.modules, "a node's start loads scikit-learn"
import sklearn
assert sklearn.__file__, "and nobody else can load it any more"
"""


def test_scikit_learn_is_not_loaded_where_it_is_installed(tmp_path: Path) -> None:
    (tmp_path / "sklearn").mkdir()
    (tmp_path / "sklearn" / "__init__.py").touch()
    (tmp_path / "sklearn" / "metrics.py").write_text("def roc_curve(): ...\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    subprocess.run([sys.executable, "-c", SCRIPT], env={**os.environ, "PYTHONPATH": path}, check=True, timeout=120)


SEARCH = """
import sys
import decode_node.node, node.build
from transformers.utils import import_utils
models = sys.modules["transformers.models"]
search = import_utils.define_import_structure
assert search.cache_info().hits == 1, "nobody asked for the answer that was kept"
num_searches = search.cache_info().misses
again = import_utils._LazyModule(models.__name__, models.__file__, search(models.__file__))
assert search.cache_info().misses == num_searches + 1, "it had searched twice"
assert again._class_to_module["LlamaForCausalLM"] == "llama.modeling_llama"
for found in ("_modules", "_class_to_module", "_object_missing_backend"):
    assert getattr(models, found) == getattr(again, found), found
"""


def test_transformers_models_are_searched_once_and_nothing_is_missed() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", SEARCH], env=env, check=True, timeout=120)
