"""Commands that are started without stdin, stdout or stderr."""

import subprocess
import sys

import pytest

PROGRAM = """
import os, subprocess, sys
from baton.process.standard_files import open_standard_files
open_standard_files()
numbers = [stream.fileno() for stream in (sys.stdin, sys.stdout, sys.stderr)]
child = subprocess.run([sys.executable, "-Sc", "import os; [os.fstat(fd) for fd in (0, 1, 2)]"], check=False)
with open(sys.argv[1], "w") as told:
    print(*numbers, child.returncode, told.fileno() > 2, file=told)
"""


def run(redirections: str, *arguments: str) -> int:
    """Python's exit code after these redirections of the shell."""
    command = ["sh", "-c", f'exec "$0" "$@" {redirections}', sys.executable, *arguments]
    return subprocess.run(command, timeout=60, check=False).returncode


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_process_has_all_three_and_hands_them_on(closed, tmp_path):
    assert run(closed, "-c", PROGRAM, str(tmp_path / "told")) == 0
    assert (tmp_path / "told").read_text().split() == ["0", "1", "2", "0", "True"]


@pytest.mark.parametrize(("module", "flags"), [("router.main", ["--no-such-flag"]), ("deploy.command", [])])
def test_a_command_ends_as_ever(module, flags):
    assert run(">&- 2>&-", "-m", module, *flags) == 2
