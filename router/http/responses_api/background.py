"""Responses that run on while nobody waits for them: their clients ask for them again, or cancel them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from baton.errors import BatonError, InternalError
from router.generation import Generation
from router.http.errors import body_of
from router.http.responses_api.events import dump_response, failure_of
from router.http.responses_api.shape import ResponseShape
from router.http.responses_api.store import ResponseSaver

log = logging.getLogger(__name__)

TASK = "background response"
"""The name of tasks that wait for one."""
_IN_OPENAIS_FORM = {"path": ""}
"""The scope of errors that no HTTP answer has."""


@dataclass(frozen=True, slots=True)
class _Running:
    task: asyncio.Task[None]
    shape: ResponseShape
    saver: ResponseSaver


class BackgroundResponses:
    """Those under way. Each is kept from its beginning on, and again as it has ended."""

    def __init__(self) -> None:
        self._running: dict[tuple[bytes, str], _Running] = {}

    def start(
        self,
        generation: Generation,
        shape: ResponseShape,
        saver: ResponseSaver,
        keep_whole: Callable[[], Awaitable[None]],
    ) -> None:
        """`keep_whole` waits for the response and keeps it, or raises BatonError."""
        key = saver.owner, saver.response_id
        saver.keep(dump_response(shape.begun()))

        async def run() -> None:
            try:
                await keep_whole()
            except BatonError as error:
                _keep_failed(shape, saver, error)
            except Exception as error:  # a request's boundary
                log.exception("internal error", extra={"request_id": generation.request_id})
                _keep_failed(shape, saver, InternalError(f"internal error: {type(error).__name__}"))
            finally:
                generation.close()
                self._running.pop(key, None)

        self._running[key] = _Running(asyncio.create_task(run(), name=TASK), shape, saver)

    async def cancel(self, owner: bytes, response_id: str) -> bool:
        """End it as cancelled, unless it ends by itself at that moment. False: it is not under way."""
        if (running := self._running.get((owner, response_id))) is None:
            return False
        running.task.cancel()
        await asyncio.wait((running.task,))
        if running.task.cancelled():
            running.saver.keep(dump_response(running.shape.cancelled()))
        return True

    def drop(self, owner: bytes, response_id: str) -> None:
        """Its client has deleted it: it ends, and is not kept."""
        if (running := self._running.get((owner, response_id))) is not None:
            running.task.cancel()


def _keep_failed(shape: ResponseShape, saver: ResponseSaver, error: BatonError) -> None:
    saver.keep(dump_response(shape.failed(failure_of(body_of(error, _IN_OPENAIS_FORM)))))
