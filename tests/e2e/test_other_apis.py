"""A chat means the same as a response, as a message, as tokens and over gRPC, on every way; drawn at random, as in
`test_parameter_combinations.py`. Completions mean the same in SGLang's form."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from random import Random

import grpc
import httpx
import pytest

from baton.v1 import generation_pb2 as pb
from baton.v1 import generation_pb2_grpc
from tests.e2e import other_apis, parameters
from tests.e2e.cluster import Router
from tests.e2e.conftest import House
from tests.e2e.other_apis import MESSAGES, RESPONSES, SGLANG, TOKENS
from tests.e2e.parameters import CHAT, COMPLETIONS, PARAMETERS, PROMPT, Fields, difference
from tests.e2e.test_parameter_combinations import own_fields

pytestmark = pytest.mark.timeout(600)

NUM_AT_ONCE = 5
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 21))]

Outcome = Fields | str


def chat_of(random: Random, can_be_said: Callable[[Fields], object]) -> Fields:
    """One with a few parameters, all of which the other API has."""
    number, fields = random.randrange(4), Fields(max_tokens=random.choice([2, 9, 28]))
    most = random.randint(3, 8)
    for name in random.sample(sorted(PARAMETERS), len(PARAMETERS)):
        more = fields | own_fields(random, name, CHAT)
        if len(more) <= most and can_be_said(_body(more, number)) is not None:
            fields = more
    return _body(fields, number)


def _body(fields: Fields, number: int) -> Fields:
    """Without what other chats of these tests say unasked, and not every API can."""
    body = parameters.body_of(CHAT, fields, number)
    return {name: value for name, value in body.items() if name != "ignore_eos" or name in fields}


async def chat_outcome(http: httpx.AsyncClient, body: Fields) -> Outcome:
    pieces = await parameters.pieces(http, CHAT, body)
    return pieces if isinstance(pieces, str) else other_apis.said_in_chat(pieces[0])


async def check(asked: Sequence[tuple[Fields, Awaitable[Outcome], Sequence[Awaitable[Outcome]]]]) -> None:
    """`asked`: chats, what they say, and what the same says on other ways."""

    async def of_case(chat: Fields, said: Awaitable[Outcome], others: Sequence[Awaitable[Outcome]]) -> bool:
        expected, *found = await asyncio.gather(said, *others)
        for way, other in enumerate(found):
            assert isinstance(expected, str) == isinstance(other, str), f"{way}: {chat}: {expected}, {other}"
            if not isinstance(expected, str) and not isinstance(other, str):
                assert difference({name: expected[name] for name in other}, other) is None, f"{way}: {chat}"
        return not isinstance(expected, str)

    answered = await asyncio.gather(*(of_case(*one) for one in asked))
    assert sum(answered) > len(answered) / 4, "most of them are refused"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("path", "translate", "said_in"),
    [
        (RESPONSES, other_apis.as_response, other_apis.said_in_response),
        (MESSAGES, other_apis.as_message, other_apis.said_in_message),
    ],
    ids=["response", "message"],
)
async def test_a_chat_means_the_same_in_another_form(
    house: House,
    path: str,
    translate: Callable[[Fields], Fields | None],
    said_in: Callable[[list[Fields]], Fields],
    seed: int,
) -> None:
    random = Random(seed)

    async def outcome(http: httpx.AsyncClient, body: Fields | None) -> Outcome:
        assert body
        pieces = await parameters.pieces(http, path, body)
        return pieces if isinstance(pieces, str) else said_in(pieces)

    async with parameters.clients_of(house.alone, house.chunk_64, house.chunk_2048) as (alone, handed_off, late):
        asked = []
        for chat in [chat_of(random, translate) for _ in range(NUM_AT_ONCE)]:
            body = translate(chat)
            streamed = translate(chat | {"stream": True})
            others = [outcome(handed_off, body), *(outcome(http, streamed) for http in (alone, handed_off, late))]
            asked.append((chat, chat_outcome(alone, chat), others))
        await check(asked)


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_chat_gets_the_same_tokens_once_it_is_rendered(house: House, seed: int) -> None:
    random = Random(seed)

    async def outcome(http: httpx.AsyncClient, chat: Fields) -> Outcome:
        rendered = await parameters.pieces(http, f"{CHAT}/render", chat)
        if isinstance(rendered, str):
            return rendered
        pieces = await parameters.pieces(http, TOKENS, rendered[0])
        return pieces if isinstance(pieces, str) else other_apis.said_in_tokens(pieces)

    async with parameters.clients_of(house.alone, house.chunk_64, house.chunk_2048) as (alone, handed_off, late):
        asked = []
        for chat in [chat_of(random, other_apis.as_tokens) for _ in range(NUM_AT_ONCE)]:
            streamed = chat | {"stream": True}
            others = [outcome(handed_off, chat), *(outcome(http, streamed) for http in (alone, handed_off, late))]
            asked.append((chat, chat_outcome(alone, chat), others))
        await check(asked)


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_chat_means_the_same_over_grpc(house: House, seed: int) -> None:
    random = Random(seed)

    async def outcome(router: Router, request: pb.GenerateRequest | None) -> Outcome:
        assert request
        async with grpc.aio.insecure_channel(str(router.grpc)) as channel:
            return await other_apis.said_over_grpc(generation_pb2_grpc.GenerationStub(channel), request)

    async with parameters.client_of(house.alone) as http:
        asked = []
        for chat in [chat_of(random, other_apis.as_grpc) for _ in range(NUM_AT_ONCE)]:
            request = other_apis.as_grpc(chat)
            others = [outcome(router, request) for router in (house.alone, house.chunk_64, house.chunk_2048)]
            asked.append((chat, chat_outcome(http, chat), others))
        await check(asked)


async def test_completions_mean_the_same_in_sglangs_form(house: House) -> None:
    said: Fields = {"n": 2, "temperature": 1.5, "top_p": 0.9, "repetition_penalty": 1.2, "stop": ["zebra"]}
    params = {**said, "max_new_tokens": 16, "sampling_seed": 7, "no_stop_trim": True}
    scores = {"return_logprob": True, "logprob_start_len": 0}
    body = {**said, "max_tokens": 16, "seed": 7, "include_stop_str_in_output": True, "logprobs": 0}
    async with parameters.clients_of(house.alone, house.chunk_64, house.chunk_2048) as (alone, handed_off, late):
        tokens = (await alone.post("/tokenize", json={"prompt": PROMPT})).json()["tokens"]
        completions = await alone.post(
            COMPLETIONS, json={**body, "prompt": PROMPT, "return_token_ids": True, "prompt_logprobs": 0}
        )
        expected = other_apis.said_in_completions(completions.json())

        async def whole(http: httpx.AsyncClient, prompt: Fields) -> list[Fields]:
            return list((await http.post(SGLANG, json={**prompt, "sampling_params": params, **scores})).json())

        async def streamed(http: httpx.AsyncClient, prompt: Fields) -> list[Fields]:
            body = {**prompt, "sampling_params": params, **scores, "stream": True}
            return [event async for event in parameters.events(http, SGLANG, body)]

        found = await asyncio.gather(
            whole(handed_off, {"text": PROMPT}),
            *(streamed(http, {"input_ids": tokens}) for http in (alone, handed_off, late)),
        )
    assert [difference(expected, other_apis.said_in_sglang(other)) for other in found] == [None] * len(found)
