"""Parameters at once, drawn at random: an answer, or why there is none, is the same on every way.

`test_parameters.py` has each parameter alone.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from random import Random

import httpx
import pytest

from tests.e2e import parameters
from tests.e2e.cluster import Router
from tests.e2e.conftest import House
from tests.e2e.parameters import CHAT, COMPLETIONS, PARAMETERS, Case, Choice, Fields, difference

pytestmark = pytest.mark.timeout(600)

NUM_AT_ONCE = 10
OF_COMPLETIONS = {"logprobs", "prompt_logprobs", "echo"}
"""What chats have in another form."""

Outcome = list[Fields] | str


def combination(random: Random) -> Case:
    """Some of the parameters may exclude each other."""
    path = random.choice([COMPLETIONS, CHAT])
    fields: Fields = {"n": random.choice([1, 1, 1, 2, 3]), "max_tokens": random.choice([1, 2, 9, 28])}
    for name in random.sample(sorted(PARAMETERS), random.randint(2, 6)):
        its_path, own = random.choice(PARAMETERS[name])
        if its_path == path or (path == CHAT and not OF_COMPLETIONS & own.keys()):
            fields |= own
    return path, parameters.body_of(path, fields, random.randrange(4))


async def outcome(http: httpx.AsyncClient, path: str, body: Fields) -> Outcome:
    """What the choices say, or why there are none."""
    answer = (await http.post(path, json=body)).text
    pieces = [line.removeprefix("data: ") for line in answer.split("\n") if line.startswith("data: {")] or [answer]
    choices = dict[int, Choice]()
    for piece in map(json.loads, pieces):
        if "error" in piece:
            return str(piece["error"]["message"])
        for choice in piece["choices"]:
            choices.setdefault(choice["index"], Choice()).add(choice)
    return [choice.said for _, choice in sorted(choices.items())]


async def outcomes(house: House, cases: list[Case]) -> list[dict[str, Outcome]]:
    """By way, for each case; all at once."""
    async with AsyncExitStack() as stack:

        async def client_of(router: Router) -> httpx.AsyncClient:
            return await stack.enter_async_context(parameters.client_of(router))

        alone, handed_off, late = [
            await client_of(router) for router in (house.alone, house.chunk_64, house.chunk_2048)
        ]

        async def of_case(path: str, body: Fields) -> dict[str, Outcome]:
            asked = {
                "alone": outcome(alone, path, body),
                "handed off": outcome(handed_off, path, body),
                "late first token": outcome(late, path, body),
                "streamed": outcome(handed_off, path, {**body, "stream": True}),
            }
            return dict(zip(asked, await asyncio.gather(*asked.values()), strict=True))

        return await asyncio.gather(*(of_case(*case) for case in cases))


def check(cases: list[Case], found: list[dict[str, Outcome]]) -> None:
    for case, ways in zip(cases, found, strict=True):
        for way, said in ways.items():
            assert difference(ways["alone"], said) is None, f"{way}: {case}"
    assert sum(isinstance(ways["alone"], list) for ways in found) > NUM_AT_ONCE / 4, "most of them are refused"


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 31))])
async def test_parameters_at_once_mean_the_same_on_every_way(house: House, seed: int) -> None:
    random = Random(seed)
    cases = [combination(random) for _ in range(NUM_AT_ONCE)]
    check(cases, await outcomes(house, cases))
