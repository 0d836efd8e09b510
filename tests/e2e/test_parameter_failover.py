"""Every parameter means the same when the decode node dies half-way. Counts and cases: see `test_parameters.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.e2e import parameters
from tests.e2e.parameters import BASE, FULL_NUMBERS, PARAMETERS, SEARCHES, Stream, cases_of, client_of, difference
from tests.e2e.scenes import Fragile
from tests.summary import compared_parameter

LONG = 110
"""Tokens of an answer during which a node is lost."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.full)])
async def test_a_parameter_outlives_the_decode_node(
    fragile: Fragile, every: bool, record_property: Callable[[str, object], None]
) -> None:
    """All requests are decoded by one node when it dies; its next life goes on with them."""
    numbers = FULL_NUMBERS if every else [0]
    named = [(name, path, body) for name in PARAMETERS for path, body in cases_of(name, numbers, every)]
    requests = [
        (path, body if body["max_tokens"] != BASE["max_tokens"] else {**body, "max_tokens": LONG})
        for _, path, body in named
    ]
    moved = dict.fromkeys(PARAMETERS, 0)
    async with client_of(fragile.pair) as client:
        expected = await asyncio.gather(*(parameters.whole(client, *request) for request in requests))
        streams = [Stream(client, *request) for request in requests]
        for (name, _, _), stream in zip(named, streams, strict=True):
            if name not in SEARCHES:
                await stream.until_begun()
        fragile.decode[0].kill()
        fragile.decode[0].start()
        for (name, _, _), wanted, stream in zip(named, expected, streams, strict=True):
            found = await stream.end()
            assert difference(wanted, found) is None, name
            if stream.timings["attempts"] > 1:
                moved[name] += 1
                record_property(*compared_parameter(name, "failover"))
    assert sum(map(bool, moved.values())) > len(moved) * 2 // 3, moved
