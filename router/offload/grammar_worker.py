"""Compiles structured outputs in a process of its own, because a hostile one can take the compiler minutes, all
memory, or the whole stack: `python -m router.offload.grammar_worker`

The first line of JSON says what to compile with: the backend, and for XGrammar a tokenizer.json, the size of the
vocabulary and the ids of EOS tokens. It is answered by a line once the process is ready. Then each line, with kind,
text and a limit in seconds of CPU time, is answered by a line of JSON: why that is invalid, null, or false if the
limit, the memory or the stack was not enough.

A child compiles them, one after another. A timer ends it at a limit, in whatever library call, and the next child is
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
from baton.process.resources import num_cpus
from baton.structured_output.constraint import CHECK_STACK_BYTES, StructuredBackend, StructuredKind, StructuredOutput
from router.offload.memory_limit import limit_memory

_MAX_MEMORY_BYTES = 2**30
"""Beside what the libraries take."""

Check = Callable[[StructuredOutput], str | None]
"""Tells why a structured output does not compile. `_checker` also tells how many threads that takes."""


def main() -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the router has ended
    warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads: OpenBLAS has some, ready for that
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the router ends it by closing stdin
    first = sys.stdin.readline()
    if not first:
        return
    check, num_threads = _checker(*json.loads(first))
    limit_memory(_virtual_bytes() + _MAX_MEMORY_BYTES)
    _write(None)
    while not _run_child(check, num_threads):
        _write(False)


def _run_child(check: Check, num_threads: int) -> bool:
    """Have a child answer, and wait for its end. False: something ended it before it had read all."""
    worker = os.getpid()
    if child := os.fork():
        return os.waitpid(child, 0)[1] == 0
    if die_with(worker):
        threading.stack_size(CHECK_STACK_BYTES)
        thread = threading.Thread(target=_answer_all, args=(check, num_threads))
        thread.start()
        thread.join()
    os._exit(1)


def _answer_all(check: Check, num_threads: int) -> None:
    while line := sys.stdin.readline():
        kind, text, limit_s = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, limit_s * num_threads)  # of all threads together
        answer = check(StructuredOutput(StructuredKind(kind), text))
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(answer)
    os._exit(0)


def _checker(backend: str, *tokenizer: Any) -> tuple[Check, int]:
    """Imports no backend but the one asked for."""
    if StructuredBackend(backend) is StructuredBackend.GUIDANCE:
        from baton.structured_output.guidance import why_invalid

        return why_invalid, 1
    from baton.structured_output.xgrammar_compiler import (
        NUM_THREADS,
        XgrammarCompiler,  # imports torch, which the router itself has not
    )

    try:
        compiler = XgrammarCompiler(*tokenizer)
    except InvalidRequest as error:
        message = error.message
        return (lambda _: message), 1

    def why_not_compiled(structured: StructuredOutput) -> str | None:
        try:
            compiler.compile(structured)
        except InvalidRequest as error:
            return error.message
        return None

    return why_not_compiled, min(NUM_THREADS, num_cpus())


def _virtual_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def _write(answer: str | bool | None) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
