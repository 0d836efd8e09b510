"""The limit of open files, in a process of its own."""

import resource
import subprocess
import sys

import pytest

from baton.process.open_files import max_open_files

PROGRAM = """
import resource
from baton.process.open_files import max_open_files, raise_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, 300))
print(max_open_files(), raise_open_files(), max_open_files(), resource.getrlimit(resource.RLIMIT_NOFILE)[1])
"""


@pytest.mark.parametrize("soft", [200, 300])
def test_the_soft_limit_becomes_the_hard_one(soft: int) -> None:
    program = PROGRAM.format(soft=soft)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == [str(soft), "300", "300", "300"]


def test_without_a_limit_there_is_a_number_to_reckon_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """`RLIM_INFINITY` is -1, of which half are no connections at all."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert max_open_files() == 2**20
