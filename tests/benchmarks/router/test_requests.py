"""What one request costs the router in function calls, which no busy machine changes; and what it leaves behind."""

import gc
import statistics
import sys

from benchmarks.router.requests import Router
from benchmarks.router.stream_clients import Answer, chat_request

CALLS_PER_REQUEST = 1680
"""Of Python and C functions, with some 330 of the benchmark's nodes; 1,670 when this was written, and up to 4 more for
most requests on a machine that has much else to do."""
NUM_REQUESTS = 10


async def test_a_request_takes_few_calls():
    router = Router(2)
    request = chat_request("Tell me a story.", 2, None)
    for _ in range(3):
        await router.ask(request)
    num_calls = [0]

    def count(frame: object, event: str, argument: object) -> None:
        num_calls[-1] += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        for _ in range(NUM_REQUESTS):
            answer = await router.ask(request)
            num_calls.append(0)
    finally:
        sys.setprofile(None)
    Answer(0.0, 0.0, answer).check(router.tokenizer.decode(router.tokens))
    assert statistics.median(num_calls[:-1]) <= CALLS_PER_REQUEST, num_calls  # some meet what is done now and then


async def test_a_request_leaves_nothing_to_the_garbage_collector():
    """What is in a cycle stays, with the whole request, until there are 20,000 objects; collecting those stops all
    streams for 10 ms."""
    router = Router(2)
    request = chat_request("Tell me a story.", 2, None)
    for _ in range(3):
        await router.ask(request)
    found = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            for _ in range(NUM_REQUESTS):
                await router.ask(request)
            found.append(gc.collect())
    finally:
        gc.enable()
    assert min(found) < NUM_REQUESTS, found  # once it may be what an earlier test has left
