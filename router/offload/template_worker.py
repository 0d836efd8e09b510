"""Renders the chat templates that requests bring, in a process of its own: a template may loop for hours, or fill all
memory: `python -m router.offload.template_worker`

The first line says how many seconds of CPU time each may take, and is answered once the process is ready. Then it
answers each line of JSON, `source`, `special_tokens` and the arguments of `ChatTemplate.render`, by a line of JSON:
`prompt`, or `refused` with the reason. A timer ends it if one takes longer.
"""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

from baton.errors import InvalidRequest
from router.limits import MAX_RENDERED_CHARS
from router.offload.memory_limit import limit_memory
from router.text.chat import ChatTemplate

_MAX_MEMORY_BYTES = 2**30


def main() -> None:
    limit_memory(_MAX_MEMORY_BYTES)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the router ends it by closing stdin
    first = sys.stdin.readline()
    if not first:
        return
    limit_s = json.loads(first)
    _write({})
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        answer = render(**json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(answer)


def render(source: str, special_tokens: dict[str, str], **chat: Any) -> dict[str, str]:
    """`prompt`, or `refused`. Never raises."""
    try:
        prompt = ChatTemplate(source, special_tokens).render(**chat)
    except InvalidRequest as error:
        return {"refused": error.message}
    except Exception as error:  # noqa: BLE001  (a request's boundary: whatever a template makes Python do)
        return {"refused": f"the chat template fails: {type(error).__name__}"}
    if len(prompt) > MAX_RENDERED_CHARS:
        return {"refused": f"the chat template writes {len(prompt)} characters, of at most {MAX_RENDERED_CHARS}"}
    return {"prompt": prompt}


def _write(answer: dict[str, str]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
