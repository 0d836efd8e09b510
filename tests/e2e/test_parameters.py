"""Every parameter means the same whether a prompt is handed off or not, the answer streamed or whole, one of n samples
or alone. `test_parameter_failover.py` has a decode node die meanwhile.

CI runs one case of each parameter; `-m full` runs all, with several prompts. The counts are in a table in the summary.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import pytest

from tests.e2e import parameters
from tests.e2e.conftest import House
from tests.e2e.parameters import BASE, CHANGE_NOTHING, PARAMETERS, SEARCHES, Fields, Stream, difference
from tests.summary import compared_parameter

pytestmark = pytest.mark.timeout(600)

NUM_SAMPLES = 3

Choices = list[Fields]


@dataclass(frozen=True)
class Answers:
    """To one request. `alone`: by one node that does all, `singles` too, each for one of the samples `together`. The
    others were handed off, in chunks of 64 tokens, or `late`, leaving the first token to the decode node."""

    alone: Choices
    plain: Choices  # without the parameter
    handed_off: Choices
    late: Choices
    streamed: Choices
    together: Choices
    singles: Choices


async def ask(house: House, cases: Iterable[parameters.Case]) -> list[Answers]:
    """All at once, all ways."""
    async with parameters.clients_of(house.alone, house.chunk_64, house.chunk_2048) as (alone, handed_off, late):
        plain = dict[str, asyncio.Task[Choices]]()

        async def without_it(path: str, body: Fields) -> Choices:
            """The same for most cases, which are asked for once."""
            bare = {name: body[name] for name in ("prompt", "messages") if name in body} | BASE
            name = json.dumps([path, bare], sort_keys=True)
            plain[name] = plain.get(name) or asyncio.create_task(parameters.whole(alone, path, bare))
            return await plain[name]

        async def of_case(path: str, body: Fields) -> Answers:
            first = asyncio.create_task(parameters.whole(alone, path, body))
            asked = {
                "alone": first,
                "plain": without_it(path, body),
                "handed_off": parameters.whole(handed_off, path, body),
                "late": parameters.whole(late, path, body),
                "streamed": Stream(handed_off, path, body).end(),
                "together": parameters.whole(handed_off, path, {**body, "n": NUM_SAMPLES}),
                "singles": of_seeds(path, body, first),
            }
            return Answers(**dict(zip(asked, await asyncio.gather(*asked.values()), strict=True)))

        async def of_seeds(path: str, body: Fields, first: Awaitable[Choices]) -> Choices:
            bodies = [{**body, "seed": body["seed"] + i} for i in range(1, NUM_SAMPLES)]
            others = (parameters.whole(alone, path, own) for own in bodies)
            return [single for [single] in await asyncio.gather(first, *others)]

        return await asyncio.gather(*(of_case(path, body) for path, body in cases))


def check(name: str, answers: Answers, record: Callable[[str], None]) -> None:
    ways = [("P/D", answers.handed_off), ("P/D", answers.late), ("streaming", answers.streamed)]
    for way, found in ways:
        assert difference(answers.alone, found) is None, way
        record(way)
    samples = list(zip(answers.singles, answers.together, strict=True))
    for i, pair in enumerate(samples[:1] if name in SEARCHES else samples):
        assert difference(*pair) is None, f"sample {i}"
        record("n")


@pytest.fixture(scope="module")
def answers(house: House) -> dict[str, Answers]:
    """To the first case of each parameter."""
    cases = {name: parameters.cases_of(name, [0], every=False)[0] for name in PARAMETERS}
    return dict(zip(cases, asyncio.run(ask(house, cases.values())), strict=True))


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_parameter_means_the_same_on_every_way(
    answers: dict[str, Answers], name: str, record_property: Callable[[str, object], None]
) -> None:
    check(name, answers[name], lambda way: record_property(*compared_parameter(name, way)))
    changed = difference(answers[name].alone, answers[name].plain) is not None
    assert changed or name in CHANGE_NOTHING, "it is ignored"


@pytest.mark.parametrize("path", [parameters.COMPLETIONS, parameters.CHAT])
async def test_best_of_has_the_likeliest_of_n_answers(house: House, path: str) -> None:
    body = parameters.body_of(path, {"logprobs": True if path == parameters.CHAT else 0})
    for router in (house.alone, house.chunk_64):
        async with parameters.client_of(router) as http:
            asked = ({**body, "n": 6}, {**body, "n": 2, "best_of": 6})
            drawn, best = await asyncio.gather(*(parameters.whole(http, path, one) for one in asked))
        expected = sorted(drawn, key=_mean_logprob, reverse=True)[:2]
        assert difference(expected, best) is None
        assert expected != drawn[:2]


def _mean_logprob(choice: Fields) -> float:
    logprobs = [token["logprob"] for token in choice.get("logprobs.content", ())]
    logprobs = logprobs or choice["logprobs.token_logprobs"]
    return sum(logprobs) / len(logprobs)


@pytest.mark.full
@pytest.mark.parametrize("name", PARAMETERS)
async def test_all_cases_of_a_parameter_mean_the_same(
    house: House, name: str, record_property: Callable[[str, object], None]
) -> None:
    for found in await ask(house, parameters.cases_of(name, parameters.FULL_NUMBERS, every=True)):
        check(name, found, lambda way: record_property(*compared_parameter(name, way)))
