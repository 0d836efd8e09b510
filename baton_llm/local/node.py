"""A node of this process: a role on its engine's thread, without the network around it."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from baton.errors import InternalError
from node import preflight
from node.errors import StartupError
from node.loop import NodeLoop, Turn
from node.parts import MakeRole, assemble
from node.settings import NodeSettings
from node.shell import NodeParts, make_hello

log = logging.getLogger(__name__)

_ADDRESS = "in-process"
_STOP_S = 10.0


class LocalNode:
    """Made with its model loaded; works from `start` to `close`. `post` and `call` reach the role, as in NodeLoop."""

    def __init__(self, settings: NodeSettings, make_role: MakeRole) -> None:
        """Takes seconds. Raises ValueError, OSError or BatonError."""
        try:
            preflight.check(settings)
        except StartupError as error:
            raise ValueError(str(error)) from None
        self._loop = NodeLoop(turn_timeout_s=settings.step_timeout)
        self._parts: NodeParts = assemble(make_role, settings, self._loop.wake)
        self.info = dataclasses.replace(self._parts.info, address=_ADDRESS)
        self.hello = make_hello(self.info, self._parts.part_blocks)
        self.tokenizer = self._parts.tokenizer
        self.transport = self._parts.transport
        self.role = self._parts.role
        self.post = self._loop.post
        self.call = self._loop.run_engine_call

    async def start(self, deliver: Callable[[Turn], None], failed: Callable[[BaseException], None]) -> None:
        """Start the role's thread and warm up. `deliver` and `failed` run on this event loop. Raises ValueError, and
        InternalError if the thread dies or hangs in it."""
        failure: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

        def fail(error: BaseException) -> None:
            if not failure.done():
                failure.set_result(error)
            failed(error)

        self._loop.start(self._parts.role, [deliver], fail)
        warm_up = asyncio.wrap_future(self.call(self._parts.warm_up))
        ends: list[asyncio.Future[Any]] = [warm_up, failure]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not warm_up.done():
            raise InternalError(f"warm-up: {failure.result()}")
        await warm_up

    def close(self) -> None:
        """End the role's thread and the transport. Idempotent."""
        if not self._loop.stop(_STOP_S):
            log.error("the engine's thread did not end within %g s node_id=%s", _STOP_S, self.info.node_id)
            return  # it may still use what is closed below
        self._parts.close()
