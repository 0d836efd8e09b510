"""The end of what an LLM has under way."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import sys
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from types import ModuleType
from typing import Any

import pytest

from baton.errors import NodeUnavailable, RequestCancelled
from baton_llm.host import Host, make_backend
from baton_llm.prompts import Encoded

PATIENCE_S = 20.0


@pytest.mark.parametrize("was_on", [True, False])
def test_a_start_of_engines_is_not_interrupted_by_collections(was_on, monkeypatch):
    collected: list[bool] = []
    backend: Any = ModuleType("backend")
    backend.LocalBackend = lambda flags: collected.append(gc.isenabled())
    monkeypatch.setitem(sys.modules, "baton_llm.local.backend", backend)
    try:
        if not was_on:
            gc.disable()
        make_backend("a-model", None, None, None, {})
        assert (collected, gc.isenabled()) == ([False], was_on)
    finally:
        gc.enable()


class SlowToEnd:
    """A backend whose requests end only some time after `stop`."""

    max_in_flight = 1

    def __init__(self) -> None:
        self.may_end = threading.Event()

    async def start(self) -> None:
        self._stopped = asyncio.Event()

    async def generate(self, request: object, take: Callable[..., None]) -> int:
        await self._stopped.wait()
        await asyncio.to_thread(self.may_end.wait, PATIENCE_S)
        raise NodeUnavailable("stopped")

    def token_text(self, token_id: int) -> str | None:
        return None

    async def stop(self) -> None:
        self._stopped.set()

    def close(self) -> None:
        self.may_end.set()


def test_a_close_waits_for_what_is_under_way(monkeypatch):
    """Each caller gets the results of its prompts, instead of a cancellation of all of them."""
    backend: Any = SlowToEnd()

    def wait(under_way: Collection[Future[Any]], timeout: float) -> None:
        backend.may_end.set()
        concurrent.futures.wait(under_way, timeout)

    monkeypatch.setattr("baton_llm.host.wait", wait)
    host = Host(backend)
    prompts = [Encoded(None, (1,))] * 3
    future = host.submit(host.answer_all(prompts, [None] * 3, [0] * 3, lambda result: None))
    host.close()
    results = future.result(PATIENCE_S)
    assert [type(result) for result in results] == [RequestCancelled] * 3
