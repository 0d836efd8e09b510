"""Parameters at once, drawn at random: an answer, or why there is none, is the same on every way.

`test_parameters.py` has each parameter alone.
"""

from __future__ import annotations

import asyncio
from random import Random

import httpx
import pytest

from tests.e2e import parameters
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
        fields |= own_fields(random, name, path)
    return path, parameters.body_of(path, fields, random.randrange(4))


def own_fields(random: Random, name: str, path: str) -> Fields:
    """Those of one case of a parameter; none, if they are of the other route."""
    its_path, own = random.choice(PARAMETERS[name])
    return own if its_path == path or (path == CHAT and not OF_COMPLETIONS & own.keys()) else {}


async def outcome(http: httpx.AsyncClient, path: str, body: Fields) -> Outcome:
    """What the choices say, or why there are none."""
    pieces = await parameters.pieces(http, path, body)
    if isinstance(pieces, str):
        return pieces
    choices = dict[int, Choice]()
    for choice in [choice for piece in pieces for choice in piece["choices"]]:
        choices.setdefault(choice["index"], Choice()).add(choice)
    return [choice.said for _, choice in sorted(choices.items())]


async def outcomes(house: House, cases: list[Case]) -> list[dict[str, Outcome]]:
    """By way, for each case; all at once."""
    async with parameters.clients_of(house.alone, house.chunk_64, house.chunk_2048) as (alone, handed_off, late):

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
