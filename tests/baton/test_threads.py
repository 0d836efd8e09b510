"""Machines that allow no threads."""

import subprocess
import sys

from baton.process.threads import why_too_few_threads

PROGRAM = "from baton.process.threads import why_too_few_threads as why; print(why())"


def test_here_are_enough():
    assert why_too_few_threads() is None


def test_without_memory_for_their_stacks_they_cannot_be_started():
    """As without room among the user's processes, whose limit does not hold for root."""
    command = ["sh", "-c", 'ulimit -s 65536; ulimit -v 400000; exec "$0" -c "$1"', sys.executable, PROGRAM]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.startswith("threads: no more than ")
