"""Compiles structured outputs in a process of its own, because a hostile one can take the compiler minutes, or all
memory: `python -m router.grammar_worker`

It writes a line once it is ready. Then it answers each line of JSON with kind and text by a line of JSON: why that is
invalid, or null. If one takes more than a few seconds, in whatever library call, an alarm ends the process.
"""

from __future__ import annotations

import json
import resource
import signal
import sys

from baton.guidance import why_invalid
from baton.structured_output import StructuredKind, StructuredOutput

ALARM_S = 3
"""The router gives up sooner; this ends the process."""
_MAX_MEMORY_BYTES = 2 * 2**30


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the router ends it by closing stdin
    _write(None)
    for line in sys.stdin:
        kind, text = json.loads(line)
        signal.alarm(ALARM_S)
        answer = why_invalid(StructuredOutput(StructuredKind(kind), text))
        signal.alarm(0)
        _write(answer)


def _write(answer: str | None) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
