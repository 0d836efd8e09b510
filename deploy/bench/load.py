"""Sends planned requests at their times, however long answers take."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.bench.client import Answer, RequestFailed
from deploy.bench.plan import PlannedRequest

Send = Callable[[Mapping[str, Any]], Awaitable[Answer]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request ended. Times are in seconds of the run. `error`: the kind of failure, empty for an answer."""

    due: float
    sent: float
    ended: float
    arrivals: tuple[float, ...] = ()
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    error: str = ""
    detail: str = ""

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """ITL as the client sees it: between events with text, which may have several tokens."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """Mean time per output token after the first; None for a single token."""
        if self.output_tokens < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1)


def shorten_collections() -> None:
    """Have Python's garbage collections leave out all objects that exist now, to be called before streams are measured:
    a collection of what imports have made stops the process for 20 ms and more, a gap in every stream."""
    gc.collect()
    gc.freeze()


async def run_load(planned: Sequence[PlannedRequest], send: Send, on_end: Callable[[Outcome], None]) -> list[Outcome]:
    """Outcomes in the order of `planned`, one of each request. `on_end` is called with each as it ends."""
    shorten_collections()
    began = time.perf_counter()

    async def one(request: PlannedRequest) -> Outcome:
        await asyncio.sleep(began + request.at - time.perf_counter())
        sent = time.perf_counter()
        try:
            answer = await send(request.body)
        except RequestFailed as error:
            outcome = Outcome(
                request.at, sent - began, time.perf_counter() - began, error=error.kind, detail=str(error)
            )
        else:
            outcome = _outcome(request, answer, began)
        on_end(outcome)
        return outcome

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(request)) for request in planned]
    return [task.result() for task in tasks]


def _outcome(request: PlannedRequest, answer: Answer, began: float) -> Outcome:
    return Outcome(
        due=request.at,
        sent=answer.sent - began,
        ended=answer.ended - began,
        arrivals=tuple(arrival - began for arrival in answer.arrivals),
        input_tokens=answer.input_tokens,
        output_tokens=answer.output_tokens,
        cached_tokens=answer.cached_tokens,
    )
