"""Chat templates that requests bring, rendered within a time limit by `router.offload.template_worker`."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Any

from baton.errors import InternalError, InvalidRequest, Overloaded
from router.offload.worker_process import WorkerProcess
from router.refusals import OnRefused, counted, turn, uncounted

log = logging.getLogger(__name__)

TIME_LIMIT_S = 1.0
"""Of CPU time, for one chat."""
_PATIENCE_S = 10.0
"""For the process to use that: other processes may keep the CPUs busy."""
_MAX_WAIT_S = 5.0
"""For others that are being rendered."""


class RequestTemplates:
    """Owns the process, which starts with the first template and renders one at a time. `are_trusted`: requests may
    bring any. Asyncio thread only."""

    def __init__(self, are_trusted: bool, on_refused: OnRefused = uncounted) -> None:
        self._on_refused = on_refused
        self._are_trusted = are_trusted
        self._worker: WorkerProcess | None = None
        self._lock = asyncio.Lock()

    def check_trusted(self) -> None:
        """Raises InvalidRequest if requests may bring none."""
        if not self._are_trusted:
            text = "`chat_template` needs --trust-request-chat-template, with which this router was not started."
            raise InvalidRequest(text, "chat_template")

    async def render(self, question: str) -> str:
        """The prompt. `question`: see `question_of`. Raises InvalidRequest, Overloaded or InternalError."""
        why = "other requests' chat templates have been rendered"
        async with turn(self._lock, _MAX_WAIT_S, why, self._on_refused):
            try:
                return await self._ask(question)
            except TimeoutError:
                raise counted(
                    Overloaded("the router's machine is too busy for chat templates"), self._on_refused
                ) from None

    def close(self) -> None:
        """The process ends, at once."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    async def _ask(self, question: str) -> str:
        if self._worker is None or self._worker.ended:
            self._worker = WorkerProcess("router.offload.template_worker")
            if not await self._worker.started(json.dumps(TIME_LIMIT_S)):
                raise InternalError("the process that renders chat templates does not start")
        line = await self._worker.answer(question, _PATIENCE_S)
        if not line:
            log.info("chat template not rendered in time chars=%d", len(question))
            why = f"chat_template: it is not rendered within {TIME_LIMIT_S:g} s of CPU time"
            raise InvalidRequest(why, "chat_template")
        answer = json.loads(line)
        if "refused" in answer:
            raise InvalidRequest(f"chat_template: {answer['refused']}", "chat_template")
        return str(answer["prompt"])


def question_of(source: str, special_tokens: Mapping[str, str], arguments: Mapping[str, Any]) -> str:
    """A line for the worker. `arguments`: of `ChatTemplate.render`."""
    content = {"source": source, "special_tokens": dict(special_tokens), **arguments}
    return "".join(json.JSONEncoder().iterencode(content))  # in Python: see `router.offload.threads`
