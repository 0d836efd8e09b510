"""One client request in flight: takes its prompts' events, gives deltas."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from baton.errors import BatonError, InternalError
from baton.messages import SampleEnd, Tokens
from baton.prompt_logprobs import PromptLogprobs
from baton.telemetry.timeline_json import log_fields
from router.deliveries import Deliveries
from router.nodes.dispatcher import Dispatcher
from router.offload.threads import Pauses
from router.requests.admission import Admitted
from router.requests.request_state import RequestEnd, RequestEvent, RequestTimings, RoutedRequest
from router.text.answer import Answer, Delta, NoAnswer, join
from router.text.prompt_logprobs import ScoredPrompt

log = logging.getLogger(__name__)

_MAX_DELTAS = 128
_MAX_LOGPROBS = 21 * _MAX_DELTAS
"""Of one `next`: writing them out must not block the event loop, nor exceed a message. A single delta may have more."""


@dataclass(slots=True)
class Part:
    """One prompt of a request. `answers[i]` is sample i. `prompt_logprobs`: what has come of them; `owed`: the samples
    whose first delta is to carry them."""

    request: RoutedRequest
    answers: Sequence[Answer | NoAnswer]
    timings: RequestTimings | None = None  # set with its end
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    owed: set[int] = field(default_factory=set)

    def with_prompt(self, sample: int, delta: Delta) -> Delta:
        """The delta, with the prompt's logprobs if they are asked for and it is the sample's first."""
        if sample not in self.owed:
            return delta
        self.owed.remove(sample)
        return delta._replace(prompt=ScoredPrompt(self.request.prompt_tokens, tuple(self.prompt_logprobs)))


@dataclass(frozen=True, slots=True)
class Usage:
    """`num_cached_tokens`: prompt tokens that the prefill node did not compute; None: this client is not told."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int | None


class Generation:
    """Runs from `start` until all its parts ended, one failed, or `close`. One consumer calls `next`.

    Tokens become text when they arrive, not when the client reads. A slow reader therefore does not delay the stop
    string that frees the nodes, and no more than its answer waits for it. The share that was `admitted` is returned
    when the last part has ended. Without `tells_timings` the client learns neither the timings nor what was cached.
    """

    def __init__(
        self,
        request_id: str,
        dispatcher: Dispatcher,
        parts: Sequence[Part],
        admitted: Admitted,
        deliveries: Deliveries,
        tells_timings: bool = True,
    ) -> None:
        self.request_id = request_id
        self.parts = parts
        self._dispatcher = dispatcher
        self._admitted = admitted
        self._live: set[str] = set()
        self._waiting: deque[Delta] = deque()
        self.tells_timings = tells_timings
        self._error: BatonError | None = None
        self._waiter: asyncio.Future[None] | None = None  # of `next`
        self._deliveries = deliveries
        self._listener: Callable[[], None] | None = None

    async def start(self, received: float) -> None:
        """Place all prompts. If it raises a BatonError, none is running."""
        self._live.update(part.request.request_id for part in self.parts)
        pause = Pauses()
        try:
            for part in self.parts:
                self._dispatcher.submit(part.request, partial(self.take, part), received)
                await pause()
                if self._error is not None:  # of a part that was placed before
                    raise self._error
            self._admitted.keep()  # what is refused does not count as a generation that took no time
        except BaseException:
            self.close()
            self._live.clear()  # those that were not placed
            self._admitted.release()
            raise

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to take, and nothing will come: it is done or has failed."""
        return not self._waiting and (self._error is not None or not self._live)

    @property
    def done(self) -> bool:
        """Whether everything has ended well and `next` has returned all of it."""
        return self.is_over and self._error is None

    async def next(self, timeout_s: float | None = None) -> list[Delta]:
        """What came since the last call, one delta per answer; waits for something, at most `timeout_s`. A reader that
        lags behind gets it in pieces.

        Empty when nothing came in time, or when everything is done. If the request ended early, raises the reason after
        everything that came before it.
        """
        if self._waiting:
            await asyncio.sleep(0)  # a reader that never waits would otherwise occupy the event loop
        elif not self.is_over:
            await self._comes(timeout_s)
        if not self._waiting:
            self.raise_error()
        return self.take_waiting()

    # ---- for a listener, in place of a consumer that calls `next` ----

    def listen(self, listener: Callable[[], None] | None) -> None:
        """Have `listener` called in its turn when there is something, whether deltas or the end; None: no more. It
        must not raise."""
        if self._listener is not None:
            self._deliveries.discard(self._listener)
        self._listener = listener
        if self._waiting or self.is_over:
            self.tell()

    def tell(self) -> None:
        """Call the listener in its turn, once for all that has come until then."""
        if self._listener is not None:
            self._deliveries.add(self._listener)

    def take_waiting(self) -> list[Delta]:
        """What `next` would return without waiting. If that is not all, the listener is called again."""
        if len(self._waiting) == 1:  # as for most tokens
            return [self._waiting.popleft()]
        by_answer: dict[int, list[Delta]] = {}
        room = _MAX_LOGPROBS
        for _ in range(min(_MAX_DELTAS, len(self._waiting))):
            delta = self._waiting.popleft()
            if delta.logprobs:
                room -= sum([1 + len(entry.top) for entry in delta.logprobs])
            by_answer.setdefault(delta.index, []).append(delta)
            if room <= 0:
                break
        if self._waiting:
            self.tell()
        return [join(deltas) for deltas in by_answer.values()]

    def raise_error(self) -> None:
        """Raises what the request failed with, if it did."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """The client left, or needs nothing more. Idempotent."""
        for request_id in list(self._live):
            self._dispatcher.cancel(request_id)
        if self._error is not None:
            self._error.__traceback__ = None  # its frames know this generation, which would be garbage with all it has

    @property
    def usage(self) -> Usage:
        return Usage(
            num_prompt_tokens=sum(len(part.request.prompt_tokens) for part in self.parts),
            num_completion_tokens=sum(answer.num_tokens for part in self.parts for answer in part.answers),
            num_cached_tokens=sum(part.timings.num_cached_tokens for part in self.parts if part.timings)
            if self.tells_timings
            else None,
        )

    @property
    def timings(self) -> RequestTimings | None:
        """Those of the prompt that took longest, among those that have ended; None: this client is not told."""
        if not self.tells_timings:
            return None
        return max((p.timings for p in self.parts if p.timings), key=lambda t: t.total_s, default=RequestTimings())

    def take(self, part: Part, event: RequestEvent) -> None:
        """An event of one part. Never raises."""
        try:
            match event:
                case Tokens():
                    self._take_tokens(part, event)
                case PromptLogprobs() as piece:
                    part.prompt_logprobs.append(piece)
                case SampleEnd(sample, reason, stop_token_id):
                    answer = part.answers[sample]
                    if not answer.ended:
                        self._waiting.append(part.with_prompt(sample, answer.end(reason, stop_token_id)))
                case RequestEnd():
                    self._take_end(part, event)
        except Exception as error:  # a request's boundary: our mistake ends this request, not the node's stream
            log.exception("internal error", extra={"request_id": self.request_id})
            self._fail(InternalError(f"{type(error).__name__}: {error}"))
        if self._listener is not None:
            self.tell()
        elif self._waiter is not None:
            _wake(self._waiter)

    def _take_tokens(self, part: Part, event: Tokens) -> None:
        answer = part.answers[event.sample]
        if not answer.ended:
            delta = answer.add(event.token_ids, event.logprobs)
            self._waiting.append(part.with_prompt(event.sample, delta) if part.owed else delta)
            if answer.ended:
                self._dispatcher.stop_sample(part.request.request_id, event.sample)

    def _take_end(self, part: Part, end: RequestEnd) -> None:
        part.timings = end.timings
        self._live.discard(part.request.request_id)
        if not self._live:
            self._admitted.release()
        self._log_end(part, end)
        if end.error is not None:
            self._fail(end.error)

    def _log_end(self, part: Part, end: RequestEnd) -> None:
        timings = end.timings
        log.info(
            "ended work=%s error=%s prompt_tokens=%d cached_tokens=%d completion_tokens=%d attempts=%d"
            " first_token_ms=%.1f total_ms=%.1f prefill_node=%s decode_node=%s",
            part.request.request_id,
            repr(end.error.message) if end.error else "none",
            len(part.request.prompt_tokens),
            timings.num_cached_tokens,
            sum(answer.num_tokens for answer in part.answers),
            timings.num_attempts,
            timings.first_token_s * 1e3,
            timings.total_s * 1e3,
            timings.prefill_node,
            timings.decode_node,
            extra={
                "request_id": self.request_id,
                "fields": partial(log_fields, end.timeline) if end.timeline else None,
            },
        )

    async def _comes(self, timeout_s: float | None) -> None:
        """Returns when something has come, or after a while."""
        loop = asyncio.get_running_loop()
        waiter = self._waiter = loop.create_future()
        timer = None if timeout_s is None else loop.call_later(timeout_s, _wake, waiter)
        try:
            await waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def _fail(self, error: BatonError) -> None:
        if self._error is None:
            self._error = error
            self.close()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
