"""What a node's start does not wait for. One process imports a node for both tests: that takes seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SKLEARN = """
from transformers.utils import is_sklearn_available
assert not is_sklearn_available(), "transformers will load scikit-learn"
assert "sklearn" not in sys.modules, "a node's start loads scikit-learn"
import sklearn
assert sklearn.__file__, "and nobody else can load it any more"
"""
SEARCH = """
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
PROGRAM = """
import gc, json, sys, traceback
gc.disable()  # as in a node: collections take a third of the imports' time
import decode_node.node, node.build
problems = []
for script in json.loads(sys.argv[1]):
    try:
        exec(script, {"sys": sys})
        problems.append("")
    except Exception:
        problems.append(traceback.format_exc())
print(json.dumps(problems))
"""


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What fails in a process that has imported a node, by script. scikit-learn is installed there."""
    sklearn = tmp_path_factory.mktemp("installed") / "sklearn"
    sklearn.mkdir()
    (sklearn / "__init__.py").touch()
    (sklearn / "metrics.py").write_text("def roc_curve(): ...\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(sklearn.parent), *filter(None, sys.path)])}
    command = [sys.executable, "-c", PROGRAM, json.dumps([SKLEARN, SEARCH])]
    done = subprocess.run(command, env=env, check=True, timeout=120, stdout=subprocess.PIPE, text=True)
    return dict(zip((SKLEARN, SEARCH), json.loads(done.stdout.splitlines()[-1]), strict=True))


def test_scikit_learn_is_not_loaded_where_it_is_installed(problems: dict[str, str]) -> None:
    assert problems[SKLEARN] == ""


def test_transformers_models_are_searched_once_and_nothing_is_missed(problems: dict[str, str]) -> None:
    assert problems[SEARCH] == ""
