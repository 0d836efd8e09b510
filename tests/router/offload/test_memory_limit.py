"""The processes that do clients' work for the router, where it was started with a limit of its own."""

import json
import subprocess
import sys

import pytest

TEMPLATE = {"source": "{{ messages[0].content }}", "special_tokens": {}, "messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("module", "asked", "answers"),
    [
        ("router.offload.template_worker", [1.0, TEMPLATE], [{}, {"prompt": "a"}]),
        ("router.offload.grammar_worker", [["guidance"], ["regex", "[0-9]+", 1.0]], [None, None]),
    ],
)
def test_less_memory_than_they_may_have_is_enough(module, asked, answers):
    command = ["sh", "-c", 'ulimit -v 1000000; exec "$0" -m "$1"', sys.executable, module]
    lines = "".join(json.dumps(line) + "\n" for line in asked)
    ran = subprocess.run(command, input=lines, stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert [json.loads(line) for line in ran.stdout.splitlines()] == answers
