"""Without the extra [node], a node says what is missing instead of showing a traceback."""

import subprocess
import sys

import pytest

BLOCK = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, NoTorch())
sys.argv = ["{0}", "--model=baton-tiny", "--listen=127.0.0.1:0"]
from {1}.main import main
main()
"""


@pytest.mark.parametrize(("command", "package"), [("baton-prefill", "prefill_node"), ("baton-decode", "decode_node")])
def test_a_missing_extra_is_told_in_one_line(command, package):
    ran = subprocess.run(
        [sys.executable, "-c", BLOCK.format(command, package)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 1
    assert ran.stderr.splitlines() == [
        f"{command}: No module named 'torch': a node needs the extra, pip install 'baton-serve[node]'"
    ]
