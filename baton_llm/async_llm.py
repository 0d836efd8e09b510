"""`AsyncLLM`: answers as they grow, for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

from baton.errors import InvalidRequest, RequestCancelled
from baton_llm.beam_search import BeamSearchParams
from baton_llm.host import Host, make_backend
from baton_llm.outputs import RequestOutput, news
from baton_llm.prompts import (
    Asked,
    ChatOptions,
    Conversation,
    Prompt,
    params_of_each,
    priorities_of_each,
    read_conversations,
    read_prompt,
)
from baton_llm.sampling_params import RequestOutputKind, SamplingParams, default_params, is_text


class AsyncLLM:
    """As `LLM`, with the same arguments and errors, one prompt to a call. Its engines do not run on the caller's event
    loop, and may serve several. The constructor blocks while the model loads."""

    def __init__(
        self,
        model: str | None = None,
        *,
        router: str | None = None,
        api_key: str | None = None,
        ssl_ca_certs: str | Path | None = None,
        **flags: Any,
    ) -> None:
        self._host = Host(make_backend(model, router, api_key, ssl_ca_certs, flags))
        self._running: dict[str, Future[None]] = {}
        self._host.close_with(self)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The answers to a prompt, again and again, each time with all that there is so far, or what the `output_kind`
        of the params says; the last one is `finished`. A reader that is slower than the engines gets fewer, with more
        in each.

        To leave the loop and close the generator (`aclose`) aborts the request; so does cancelling the task that reads.
        request_id: one that is not in use; None: a number. priority: a lower one is served earlier. Raises BatonError:
        InvalidRequest, before anything runs, for a bad prompt or bad sampling_params; RequestCancelled after `abort`
        and `close`.
        """
        return self._stream(read_prompt(prompt), sampling_params, request_id, priority)

    def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        **options: Unpack[ChatOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `generate`, for a conversation that the model's chat template turns into a prompt. options: see
        ChatOptions."""
        conversations = read_conversations(messages, options)
        if len(conversations) != 1:
            raise InvalidRequest(f"messages must be one conversation, not {len(conversations)}", "messages")
        return self._stream(conversations[0], sampling_params, request_id, priority)

    def beam_search(
        self, prompt: Prompt, params: BeamSearchParams, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """As LLM.beam_search, for one prompt: a single output, with all answers. request_id, and what it raises: as
        `generate`."""
        return self._stream(read_prompt(prompt), params.sampling_params(), request_id, 0)

    async def get_tokenizer(self) -> Any:
        """As LLM.get_tokenizer."""
        return await asyncio.to_thread(self._host.backend.tokenizer)

    async def get_default_sampling_params(self) -> SamplingParams:
        """As LLM.get_default_sampling_params."""
        defaults = await asyncio.wrap_future(self._host.submit(self._host.backend.defaults()))
        return default_params(defaults)

    async def abort(self, request_id: str) -> None:
        """End a request; no-op if it has ended."""
        if future := self._running.get(request_id):
            future.cancel()

    def close(self) -> None:
        """As LLM.close. Blocks until all threads have ended; `async with` does not."""
        self._host.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    async def _stream(
        self, prompt: Asked, params: SamplingParams | None, request_id: str | None, priority: int
    ) -> AsyncGenerator[RequestOutput, None]:
        [params], [priority] = params_of_each(params, 1), priorities_of_each(priority, 1)
        request_id = self._host.next_id() if request_id is None else request_id
        if not is_text(request_id):  # the nodes hash it
            raise InvalidRequest(f"request_id must be a text, not {request_id!r}", "request_id")
        if request_id in self._running:
            raise InvalidRequest(f"request_id {request_id!r} is in use", "request_id")
        latest = _Latest(asyncio.get_running_loop())
        future = self._running[request_id] = self._host.submit(
            _answer(self._host, prompt, params, priority, request_id, latest)
        )
        future.add_done_callback(latest.end)
        kind = params.output_kind if params else RequestOutputKind.CUMULATIVE
        try:
            output: RequestOutput | None = None
            while output is None or not output.finished:
                before, output = output, await latest.get()
                if kind is not RequestOutputKind.FINAL_ONLY or output.finished:
                    yield news(output, before) if kind is RequestOutputKind.DELTA else output
        finally:
            future.cancel()
            del self._running[request_id]


class _Latest:
    """The newest output, from the background thread to the reader on `aio`."""

    def __init__(self, aio: asyncio.AbstractEventLoop) -> None:
        self._aio = aio
        self._newest: RequestOutput | BaseException | None = None
        self._something = asyncio.Event()

    def put(self, newest: RequestOutput | BaseException) -> None:
        """On any thread. An exception is raised at the reader. Raises RuntimeError if the reader's loop is closed."""
        self._aio.call_soon_threadsafe(self._set, newest)

    async def get(self) -> RequestOutput:
        await self._something.wait()
        self._something.clear()
        newest, self._newest = self._newest, None
        assert newest is not None
        if isinstance(newest, BaseException):
            raise newest
        return newest

    def end(self, future: Future[None]) -> None:
        """When the work is over. If it was cancelled, maybe before it began, it has put no last output."""
        if future.cancelled():
            with contextlib.suppress(RuntimeError):  # a closed loop has no reader
                self.put(RequestCancelled("the request was aborted"))

    def _set(self, newest: RequestOutput | BaseException) -> None:
        self._newest = newest
        self._something.set()


async def _answer(
    host: Host, prompt: Asked, params: SamplingParams | None, priority: int, request_id: str, latest: _Latest
) -> None:
    """On the background loop."""
    try:
        [encoded] = await host.encode([prompt], [params])
        latest.put(await host.answer(request_id, encoded, params, priority, latest.put))
    except Exception as error:  # noqa: BLE001 - raised at the reader
        latest.put(error)
