"""What `LLM` and `AsyncLLM` share: a backend on a background thread, from its start to its end."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from pathlib import Path
from typing import Any, TypeVar

from baton.errors import BatonError, NodeUnavailable, RequestCancelled
from baton_llm.backend import CLOSED, Backend
from baton_llm.background import STOP_S, Background
from baton_llm.outputs import Collector, RequestOutput
from baton_llm.prompts import Asked, Encoded, Salted
from baton_llm.sampling_params import SamplingParams, request_of
from node.garbage import uncollected

log = logging.getLogger(__name__)

T = TypeVar("T")
DEFAULT_MODEL = "baton-tiny"
FORKED = "an LLM works only in the process that made it, not in a fork of it, which has none of its threads"


class Host:
    """Runs a backend until `close`. The background thread refers to it, and never to the LLM that owns it, so an LLM
    without users is collected, and closes its host (`close_with`)."""

    def __init__(self, backend: Backend) -> None:
        """Raises what the backend's start raises."""
        self.backend = backend
        self._background = Background()
        self._lock = threading.Lock()
        self._closed = False
        self._process = os.getpid()
        self._serial = itertools.count()
        self._under_way: set[Future[Any]] = set()
        try:
            self.submit(backend.start()).result()
        except BaseException:
            self.close()
            raise
        _open_hosts.add(self)

    def close_with(self, owner: object) -> None:
        """Close when `owner` is collected: on a thread of its own, since that happens on any thread, also on one that
        the close waits for."""
        finalizer = weakref.finalize(owner, lambda: threading.Thread(target=self.close, name="baton-close").start())
        finalizer.atexit = False  # see _close_all

    def next_id(self) -> str:
        return str(next(self._serial))

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run it on the background loop. Raises RuntimeError when closed, and in a fork of the process."""
        if self._closed or self._is_forked:
            work.close()
            raise RuntimeError(CLOSED if self._closed else FORKED)
        future = self._background.submit(work)
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return future

    async def encode(self, prompts: Sequence[Asked], params: Sequence[SamplingParams | None]) -> list[Encoded]:
        """Raises BatonError for the first prompt that cannot be answered."""
        return [await self._encode(prompt, own) for prompt, own in zip(prompts, params, strict=True)]

    async def _encode(self, prompt: Asked, params: SamplingParams | None) -> Encoded:
        if not isinstance(prompt, Salted):
            return await self.backend.encode(prompt, params)
        encoded = await self.backend.encode(prompt.prompt, params)
        return dataclasses.replace(encoded, cache_salt=prompt.cache_salt)

    async def answer(
        self,
        request_id: str,
        prompt: Encoded,
        params: SamplingParams | None,
        priority: int = 0,
        on_change: Callable[[RequestOutput], None] | None = None,
    ) -> RequestOutput:
        """The finished output; `on_change` gets what there is so far whenever there is more. Raises BatonError."""
        request = request_of(params, request_id, prompt.token_ids, priority, prompt.cache_salt)
        with_logprobs = params is not None and params.has_logprobs
        with_ranks = params is None or params.logprob_token_ids is None
        with_text = params is None or params.detokenize
        collector = Collector(
            request_id, prompt, request.n, with_logprobs, self.backend.token_text, with_text, with_ranks
        )

        def take(deltas: Sequence[Any]) -> None:
            collector.add(deltas)
            if on_change is not None and not collector.all_ended:
                on_change(collector.output(finished=False))

        try:
            num_cached_tokens = await self.backend.generate(request, take)
        except NodeUnavailable:
            if self._closed:  # by its own caller, and not something that might come back
                raise RequestCancelled(CLOSED) from None
            raise
        return collector.output(finished=True, num_cached_tokens=num_cached_tokens)

    async def answer_all(
        self,
        prompts: Sequence[Encoded],
        params: Sequence[SamplingParams | None],
        priorities: Sequence[int],
        on_end: Callable[[RequestOutput | BatonError], None],
    ) -> list[RequestOutput | BatonError]:
        """What became of each prompt, in order. As many are under way at once as the backend takes, those of a lower
        priority value first."""
        room = asyncio.Semaphore(self.backend.max_in_flight)

        async def answer_one(prompt: Encoded, own: SamplingParams | None, priority: int) -> RequestOutput | BatonError:
            result: RequestOutput | BatonError
            async with room:
                try:
                    result = await self.answer(self.next_id(), prompt, own, priority)
                except BatonError as error:
                    result = error
            on_end(result)
            return result

        order = sorted(range(len(prompts)), key=priorities.__getitem__)
        results = await asyncio.gather(*(answer_one(prompts[i], params[i], priorities[i]) for i in order))
        by_prompt = dict(zip(order, results, strict=True))
        return [by_prompt[i] for i in range(len(prompts))]

    @property
    def _is_forked(self) -> bool:
        return os.getpid() != self._process

    def close(self) -> None:
        """End all requests, threads and engines. Idempotent; not on one of its own threads. In a fork of the process
        there is nothing to end."""
        if self._is_forked:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        _open_hosts.discard(self)
        try:
            self._background.submit(self.backend.stop()).result(STOP_S)
            wait(list(self._under_way), STOP_S)  # each caller gets what its prompts have come to
        except Exception:  # the end of everything: the threads must end in any case
            log.exception("the backend did not stop")
        self.backend.close()
        self._background.close()


def result_of(future: Future[T]) -> T:
    """Its result. An interrupt of the waiting thread (Ctrl-C) cancels the work. Raises RequestCancelled when the work
    was cancelled by a close."""
    try:
        return future.result()
    except CancelledError:
        raise RequestCancelled(CLOSED) from None
    except BaseException:
        future.cancel()
        raise


def make_backend(
    model: str | None,
    router: str | None,
    api_key: str | None,
    ssl_ca_certs: str | Path | None,
    flags: Mapping[str, Any],
) -> Backend:
    """The engines of this process, or the cluster behind a router. Raises TypeError for what does not go together, and
    what the backends raise."""
    if router is not None:
        if flags:
            raise TypeError(f"with a router there are no flags of nodes: {', '.join(sorted(flags))}")
        from baton_llm.remote import RemoteBackend

        return RemoteBackend(router, model, api_key, ssl_ca_certs)
    if api_key is not None or ssl_ca_certs is not None:
        raise TypeError("api_key and ssl_ca_certs are for a router")
    with uncollected():
        try:
            from baton_llm.local.backend import LocalBackend  # imports torch, which a client of a router need not have
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{error}: engines in this process need the extra, pip install 'baton-serve[node]'", name=error.name
            ) from error
        return LocalBackend({"model": model or DEFAULT_MODEL, **flags})


_open_hosts: weakref.WeakSet[Host] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """At the end of the process, before the interpreter tears down what the threads use."""
    for host in list(_open_hosts):
        with contextlib.suppress(Exception):
            host.close()
