"""Compiles structured outputs in a process of its own, because a hostile one can take the compiler minutes, all
memory, or the whole stack: `python -m router.offload.grammar_worker`

The first line of JSON says what to compile with: the backend, and for XGrammar a tokenizer.json, the size of the
vocabulary and the ids of EOS tokens. It is answered by a line once the process is ready. Then each line, with kind and
text, is answered by a line of JSON: why that is invalid, or null. If one takes more than a few seconds, in whatever
library call, an alarm ends the process.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from baton.errors import InvalidRequest
from baton.structured_output.constraint import CHECK_STACK_BYTES, StructuredBackend, StructuredKind, StructuredOutput
from router.offload.memory_limit import limit_memory

ALARM_S = 3
"""The router gives up sooner; this ends the process."""
_MAX_MEMORY_BYTES = 2 * 2**30
"""Beside what the libraries take."""


def main() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the router ends it by closing stdin
    threading.stack_size(CHECK_STACK_BYTES)
    thread = threading.Thread(target=_answer_all)
    thread.start()
    thread.join()


def _answer_all() -> None:
    first = sys.stdin.readline()
    if not first:
        return
    why_invalid = _checker(*json.loads(first))
    limit_memory(_virtual_bytes() + _MAX_MEMORY_BYTES)
    _write(None)
    for line in sys.stdin:
        kind, text = json.loads(line)
        signal.alarm(ALARM_S)
        answer = why_invalid(StructuredOutput(StructuredKind(kind), text))
        signal.alarm(0)
        _write(answer)


def _checker(backend: str, *tokenizer: Any) -> Callable[[StructuredOutput], str | None]:
    """Tells why a structured output does not compile. Imports no backend but the one asked for."""
    if StructuredBackend(backend) is StructuredBackend.GUIDANCE:
        from baton.structured_output.guidance import why_invalid

        return why_invalid
    from baton.structured_output.xgrammar_compiler import (
        XgrammarCompiler,  # imports torch, which the router itself has not
    )

    compiler = XgrammarCompiler(*tokenizer)

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


def _write(answer: str | None) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
