"""Every parameter means the same when the decode node dies half-way. Counts and cases: see `test_parameters.py`."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from tests.e2e import parameters
from tests.e2e.parameters import BASE, FULL_NUMBERS, PARAMETERS, SEARCHES, Stream, cases_of, client_of, difference
from tests.e2e.scenes import Fragile
from tests.summary import compared_parameter

LONG = 90
"""Tokens of an answer during which a node is lost."""


BATCH = 41
"""Requests that run when a node is lost: with more of them, the first would have ended before the last have begun."""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.full)])
async def test_a_parameter_outlives_the_decode_node(
    fragile: Fragile, every: bool, record_property: Callable[[str, object], None]
) -> None:
    """All requests are decoded by one node when it dies; its next life goes on with them."""
    numbers = FULL_NUMBERS if every else [0]
    named = [(name, case) for number in numbers for name in PARAMETERS for case in cases_of(name, [number], every)]
    moved = Counter[str]()
    for start in range(0, len(named), BATCH):
        await fragile.wait_ready()
        moved.update(await lose_node(fragile, named[start : start + BATCH]))
    for name, count in moved.items():
        for _ in range(count):
            record_property(*compared_parameter(name, "failover"))
    assert len(moved) > len(PARAMETERS) * 2 // 3, moved


async def lose_node(fragile: Fragile, named: Sequence[tuple[str, parameters.Case]]) -> list[str]:
    """Kill the decode node amid these requests, by the parameters that they use, and compare their answers with those
    of an undisturbed run. Returns the parameters of those that went on elsewhere."""
    requests = [
        (path, body if body["max_tokens"] != BASE["max_tokens"] else {**body, "max_tokens": LONG})
        for _, (path, body) in named
    ]
    moved = []
    async with client_of(fragile.pair) as client:
        expected = await asyncio.gather(*(parameters.whole(client, *request) for request in requests))
        streams = [Stream(client, *request) for request in requests]
        for (name, _), stream in zip(named, streams, strict=True):
            if name not in SEARCHES:
                await stream.until_begun()
        fragile.decode[0].kill()
        fragile.decode[0].start()
        for (name, _), wanted, stream in zip(named, expected, streams, strict=True):
            found = await stream.end()
            assert difference(wanted, found) is None, name
            if stream.timings["attempts"] > 1:
                moved.append(name)
    return moved
