"""A generation between its nodes and its reader: started and ended as a whole, read bit by bit."""

import asyncio
import gc
import weakref
from functools import partial
from typing import Any

import pytest

from baton.errors import BatonError, NodeUnavailable, RequestCancelled
from baton.messages import SampleEnd, TokenLogprobs, Tokens
from baton.sampling import FinishReason, SamplingParams
from router.deliveries import Deliveries
from router.generation import Generation, Part
from router.nodes.dispatcher import Sink
from router.requests.admission import Admission, Full
from router.requests.request_state import RequestEnd, RequestTimings, RoutedRequest
from router.text.answer import Answer
from router.text.stops import StopScanner, StopStrings
from tests.router.tiny_tokenizer import tiny_tokenizer


class Placing:
    """Of a dispatcher, what a generation uses. `refuses`: the request that cannot be placed; `at_once`: those that end
    while they are placed."""

    def __init__(self, refuses: str = "", at_once: tuple[str, ...] = ()) -> None:
        self.sinks: dict[str, Sink] = {}
        self._refuses = refuses
        self._at_once = at_once

    def submit(self, request: RoutedRequest, sink: Sink, received: float) -> None:
        if request.request_id == self._refuses:
            raise NodeUnavailable("no node")
        self.sinks[request.request_id] = sink
        if request.request_id in self._at_once:
            self.end(request.request_id)

    def cancel(self, request_id: str) -> None:
        if request_id in self.sinks:
            self.end(request_id, RequestCancelled("left"))

    def end(self, request_id: str, error: BatonError | None = None) -> None:
        self.sinks.pop(request_id)(RequestEnd(error, RequestTimings()))


def part(name: str, n: int = 1) -> Part:
    def answer(index: int) -> Answer:
        return Answer(index, tiny_tokenizer().detokenizer(), StopScanner(StopStrings(())), frozenset())

    return Part(RoutedRequest(name, (1, 2), n, SamplingParams(), 60.0), [answer(i) for i in range(n)])


def generation(placing: Placing, *parts: Part, admission: Admission | None = None) -> tuple[Generation, Admission]:
    admission = admission or Admission()
    dispatcher: Any = placing
    return Generation("r", dispatcher, parts, admission.admit(len(parts), 2 * len(parts)), Deliveries()), admission


async def test_a_reader_that_lags_gets_all_bit_by_bit():
    placing = Placing()
    subject, _ = generation(placing, part("a", n=2))
    await subject.start(0.0)
    text = tiny_tokenizer().encode("the fox", False)
    tokens = text * 500
    for token in tokens:
        for sample in range(2):
            placing.sinks["a"](Tokens(sample, 0, (token,)))
    for sample in range(2):
        placing.sinks["a"](SampleEnd(sample, FinishReason.STOP, None))
    placing.end("a")
    read = {0: "", 1: ""}
    ids: dict[int, list[int]] = {0: [], 1: []}
    while not subject.done:
        deltas = await subject.next()
        assert len(deltas) <= 2
        assert 0 < sum(len(delta.token_ids) for delta in deltas) <= 128 or deltas[-1].finish_reason
        for delta in deltas:
            read[delta.index] += delta.text
            ids[delta.index] += delta.token_ids
    assert read == {0: "the fox" * 500, 1: "the fox" * 500}
    assert ids == {0: list(tokens), 1: list(tokens)}


async def test_a_reader_that_lags_gets_few_tokens_with_many_logprobs():
    """All at once would be a gigabyte, and block the event loop for as long as it takes to write."""
    placing, top = Placing(), tuple((token, -2.0) for token in range(999))
    subject, _ = generation(placing, part("a"))
    await subject.start(0.0)
    for index in range(9):
        placing.sinks["a"](Tokens(0, index, (300,), (TokenLogprobs(-1.0, top),)))
    placing.sinks["a"](Tokens(0, 9, (300,), (TokenLogprobs(-1.0, top * 9),)))
    placing.sinks["a"](Tokens(0, 10, (300,), (TokenLogprobs(-1.0),)))
    placing.end("a")
    read = [len(delta.token_ids) for _ in range(5) for delta in await subject.next()]
    assert read == [3, 3, 3, 1, 1]
    assert subject.done


async def test_a_listener_that_leaves_ahead_of_its_turn_is_not_called():
    placing, called = Placing(), list[str]()
    subject, _ = generation(placing, part("a"))
    await subject.start(0.0)
    subject.listen(partial(called.append, "first"))
    placing.sinks["a"](Tokens(0, 0, (300,)))
    subject.listen(None)
    await asyncio.sleep(0)
    assert called == []
    subject.listen(partial(called.append, "second"))
    await asyncio.sleep(0)
    assert called == ["second"], "for what came before"


async def test_what_cannot_be_placed_whole_is_not_placed():
    placing = Placing(refuses="c")
    subject, admission = generation(placing, part("a"), part("b"), part("c"), part("d"))
    with pytest.raises(NodeUnavailable):
        await subject.start(0.0)
    assert not placing.sinks
    assert admission.num_requests == 0


async def test_what_cannot_be_placed_says_nothing_of_how_long_generations_last():
    """By which `Retry-After` goes: for want of nodes, or of room on them, all are refused at once."""
    now = [0.0]
    placing, admission = Placing(refuses="b"), Admission(2, clock=lambda: now[0])
    subject, _ = generation(placing, part("a"), admission=admission)
    await subject.start(0.0)
    now[0] = 40.0
    placing.end("a")
    for _ in range(50):
        subject, _ = generation(placing, part("b"), admission=admission)
        with pytest.raises(NodeUnavailable):
            await subject.start(40.0)
    admission.admit(2, 0)
    with pytest.raises(Full) as error:
        admission.admit(1, 0)
    assert error.value.retry_after_s == 20, "half of what is in flight has to end"


async def test_a_part_that_ends_while_others_are_placed_is_not_the_end():
    placing = Placing(at_once=("a", "c"))
    subject, admission = generation(placing, part("a"), part("b"), part("c"))
    await subject.start(0.0)
    assert not subject.done
    assert (admission.num_requests, admission.num_tokens) == (3, 6)
    placing.end("b")
    assert subject.done
    assert (admission.num_requests, admission.num_tokens) == (0, 0)


async def test_closing_gives_back_what_was_admitted():
    placing = Placing()
    subject, admission = generation(placing, part("a"), part("b"))
    await subject.start(0.0)
    subject.close()
    subject.close()
    assert admission.num_requests == 0
    with pytest.raises(RequestCancelled):
        await subject.next()


async def test_one_that_has_failed_is_no_garbage_once_it_is_closed():
    placing = Placing()
    subject, _ = generation(placing, part("a"))
    await subject.start(0.0)
    placing.end("a", NodeUnavailable("lost"))

    async def read(subject: Generation) -> None:
        try:
            with pytest.raises(NodeUnavailable):
                await subject.next()
        finally:
            subject.close()

    kept = weakref.ref(subject)
    gc.disable()
    try:
        await read(subject)
        del subject
        assert kept() is None
    finally:
        gc.enable()


async def test_a_reader_waits_no_longer_than_it_wants_to():
    placing = Placing()
    subject, _ = generation(placing, part("a"))
    await subject.start(0.0)
    async with asyncio.timeout(10):
        assert await subject.next(0.001) == []
    reading = asyncio.create_task(subject.next(60.0))
    await asyncio.sleep(0)
    placing.sinks["a"](Tokens(0, 0, (tiny_tokenizer().encode("fox", False)[0],)))
    async with asyncio.timeout(10):
        (delta,) = await reading
    assert delta.token_ids
