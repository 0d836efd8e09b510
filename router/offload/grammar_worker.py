"""Compiles structured outputs in a process of its own, because a hostile one can take the compiler minutes, all
memory, or the whole stack: `python -m router.offload.grammar_worker`

The first line of JSON says what to compile with: the backend, and for XGrammar a tokenizer.json, the size of the
vocabulary and the ids of EOS tokens. It is answered by a line once the process is ready. Then each line, with kind,
text and a limit in seconds, is answered by a line of JSON: why that is invalid, null, or false if the limit, the memory
or the stack was not enough.

A child compiles them, one after another. An alarm ends it at a limit, in whatever library call, and the next child is
forked from what was loaded at the start, which takes milliseconds instead of seconds.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from baton.errors import InvalidRequest
from baton.process.parent import die_with
from baton.structured_output.constraint import CHECK_STACK_BYTES, StructuredBackend, StructuredKind, StructuredOutput
from router.offload.memory_limit import limit_memory

_MAX_MEMORY_BYTES = 2**30
"""Beside what the libraries take."""

Check = Callable[[StructuredOutput], str | None]
"""Tells why a structured output does not compile."""


def main() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the router has ended
    warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads: OpenBLAS has some, ready for that
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the router ends it by closing stdin
    first = sys.stdin.readline()
    if not first:
        return
    check = _checker(*json.loads(first))
    limit_memory(_virtual_bytes() + _MAX_MEMORY_BYTES)
    _write(None)
    while not _run_child(check):
        _write(False)


def _run_child(check: Check) -> bool:
    """Have a child answer, and wait for its end. False: something ended it before it had read all."""
    worker = os.getpid()
    if child := os.fork():
        return os.waitpid(child, 0)[1] == 0
    if die_with(worker):
        threading.stack_size(CHECK_STACK_BYTES)
        thread = threading.Thread(target=_answer_all, args=(check,))
        thread.start()
        thread.join()
    os._exit(1)


def _answer_all(check: Check) -> None:
    while line := sys.stdin.readline():
        kind, text, limit_s = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        answer = check(StructuredOutput(StructuredKind(kind), text))
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(answer)
    os._exit(0)


def _checker(backend: str, *tokenizer: Any) -> Check:
    """Imports no backend but the one asked for."""
    if StructuredBackend(backend) is StructuredBackend.GUIDANCE:
        from baton.structured_output.guidance import why_invalid

        return why_invalid
    from baton.structured_output.xgrammar_compiler import (
        XgrammarCompiler,  # imports torch, which the router itself has not
    )

    try:
        compiler = XgrammarCompiler(*tokenizer)
    except InvalidRequest as error:
        message = error.message
        return lambda _: message

    def why_not_compiled(structured: StructuredOutput) -> str | None:
        try:
            compiler.compile(structured)
        except InvalidRequest as error:
            return error.message
        return None

    return why_not_compiled


def _virtual_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def _write(answer: str | bool | None) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
