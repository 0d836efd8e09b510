"""What a node's start does not wait for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
import engine.model.loader
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
