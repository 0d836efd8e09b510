"""The tokens that come out of a cluster are those that `transformers` generates, whichever way they went.

CI runs a pairwise choice of the ways, each with its share of the prompts; `-m full` runs all prompts all ways.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import grpc
import pytest

from baton import wire
from baton.v1 import node_pb2, node_pb2_grpc
from tests.e2e import reference_file
from tests.e2e.client import Answer, Client
from tests.e2e.cluster import PATIENCE_S
from tests.e2e.conftest import House
from tests.e2e.reference_file import Reference, ReferenceFile
from tests.summary import COMPARED, NEAR_TIES

pytestmark = pytest.mark.timeout(300)

BLOCK = 16
AT_ONCE = (1, 32)
CHUNKS = (64, 2048)
HITS = ("none", "prefill", "decode", "both")


@dataclass(frozen=True)
class Way:
    """So many prompts at once, prefilled in such chunks, with their prefixes cached on these nodes."""

    at_once: int
    chunk: int
    hits: str

    def __str__(self) -> str:
        return f"{self.at_once}-at-once-chunks-of-{self.chunk}-hits-on-{self.hits}"


WAYS = [Way(*way) for way in product(AT_ONCE, CHUNKS, HITS)]
PAIRWISE = [Way(n, CHUNKS[(i + j) % 2], hits) for i, hits in enumerate(HITS) for j, n in enumerate(AT_ONCE)]
"""Every two values of different kinds meet in one of these."""


@pytest.fixture(scope="session")
def references(house: House) -> ReferenceFile:
    """Those of the checkpoint that the nodes have loaded."""
    file = reference_file.load()
    with grpc.insecure_channel(str(house.nodes[0].address)) as channel:
        status = node_pb2_grpc.NodeStatusStub(channel)
        info = wire.read_node_info(status.Describe(node_pb2.DescribeRequest(), timeout=PATIENCE_S))
    assert info.layout.fingerprint == file.fingerprint, (
        "references.npz was made for another checkpoint than the one that is embedded now: "
        "make it anew with `python -m tests.e2e.references`"
    )
    return file


@pytest.fixture
def judge(record_property: Callable[[str, object], None]) -> Iterator[Judge]:
    judge = Judge()
    yield judge
    record_property(COMPARED, judge.num_compared)
    record_property(NEAR_TIES, judge.num_near_ties)


class Judge:
    """Holds answers against references."""

    def __init__(self) -> None:
        self.num_compared = 0
        self.num_near_ties = 0

    def check(self, answer: Answer, reference: Reference, max_tokens: int | None = None) -> None:
        """`max_tokens`: of the request, if that was for fewer tokens than the reference's, EOS ignored."""
        assert answer.status == 200, answer.error
        assert answer.done
        assert answer.usage["prompt_tokens"] == len(reference.prompt)
        assert answer.usage["completion_tokens"] == len(answer.tokens[0])
        assert answer.timings["attempts"] == 1
        self.num_compared += 1
        difference = reference.difference(answer.tokens[0], max_tokens)
        if difference is None:
            assert answer.finishes == {0: "length" if max_tokens else reference.finish}
            return
        assert difference.is_near_tie, str(difference)
        self.num_near_ties += 1
        print(f"near tie: {difference}")


class Asker:
    """Sends references' prompts, each by another way into the router."""

    def __init__(self, client: Client, salt: str) -> None:
        self._client = client
        self._salt = salt
        self._count = 0

    async def __call__(self, reference: Reference, max_tokens: int | None = None) -> Answer:
        """`max_tokens`: fewer than the reference's, EOS ignored."""
        fields: dict[str, Any] = {"max_tokens": reference.max_tokens, "ignore_eos": reference.ignore_eos}
        if max_tokens:
            fields = {"max_tokens": max_tokens, "ignore_eos": True}
        fields["cache_salt"] = self._salt
        self._count += 1
        prompt = await self._prompt(reference)
        if self._count % 3 == 0:
            return await self._client.generate(prompt, **fields)
        return await self._client.complete(prompt, stream=self._count % 3 == 1, **fields)

    async def _prompt(self, reference: Reference) -> str | list[int]:
        if reference.kind != "text":
            return list(reference.prompt)
        return await self._client.text_of(reference.prompt[1:])  # without BOS, which the tokenizer adds


Run = Callable[[Reference], Coroutine[Any, Any, Answer]]


async def run(ask: Run, references: Sequence[Reference], at_once: int) -> list[Answer]:
    """All of them, so many at a time."""
    answers: list[Answer] = []
    for start in range(0, len(references), at_once):
        answers += await asyncio.gather(*map(ask, references[start : start + at_once]))
    return answers


async def run_way(house: House, way: Way, references: Sequence[Reference], judge: Judge, salt: str) -> None:
    router, other = (house.chunk_64, house.chunk_2048) if way.chunk == 64 else (house.chunk_2048, house.chunk_64)
    async with Client(router) as client, Client(other) as elsewhere:
        ask, ask_elsewhere = Asker(client, salt), Asker(elsewhere, salt)
        for start in range(0, len(references), 32):  # groups that surely stay in the caches
            group = references[start : start + 32]
            if way.hits == "prefill":  # one token never leaves the prefill node
                await warm(lambda r: ask(r, 1), 1, group, judge)
            elif way.hits == "decode":
                await warm(lambda r: ask_elsewhere(r, 2), 2, group, judge)
            elif way.hits == "both":
                await warm(lambda r: ask(r, 2), 2, group, judge)
            for reference, answer in zip(group, await run(ask, group, way.at_once), strict=True):
                judge.check(answer, reference)
                check_hits(way, reference, answer)


async def warm(ask: Run, max_tokens: int, references: Sequence[Reference], judge: Judge) -> None:
    """Put the prompts into the caches."""
    for reference, answer in zip(references, await run(ask, references, 32), strict=True):
        judge.check(answer, reference, max_tokens)


def check_hits(way: Way, reference: Reference, answer: Answer) -> None:
    """All full blocks of the prompt were found where they had to be, and nowhere else."""
    length = len(reference.prompt)
    on_prefill = (length - 1) // BLOCK * BLOCK if way.hits in ("prefill", "both") else 0
    on_decode = length // BLOCK * BLOCK if way.hits in ("decode", "both") else 0
    assert answer.timings["cached_tokens"] == on_prefill
    if len(answer.tokens[0]) > 1:
        assert answer.timings["decode_cached_tokens"] == on_decode


def share(references: ReferenceFile, index: int) -> list[Reference]:
    """The prompts of PAIRWISE[index]: 6 to go one at a time, or 16 to go at once; all lengths, ids and text."""
    one_at_a_time = PAIRWISE[index].at_once == 1
    ours = [r for i, r in enumerate(references.of_kind("ids", "text")) if (i % 7 < 3) == one_at_a_time]
    return ours[index // 2 + 8 :: 16] if one_at_a_time else ours[index // 2 :: 8]


@pytest.mark.parametrize("index", range(len(PAIRWISE)), ids=lambda i: str(PAIRWISE[i]))
async def test_tokens_are_those_of_the_reference(
    house: House, references: ReferenceFile, judge: Judge, index: int
) -> None:
    await run_way(house, PAIRWISE[index], share(references, index), judge, f"pairwise {index}")


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", WAYS, ids=str)
async def test_all_tokens_are_those_of_the_reference(
    house: House, references: ReferenceFile, judge: Judge, way: Way
) -> None:
    every = references.of_kind("ids", "text")
    await run_way(house, way, [r for i in range(7) for r in every[i::7]], judge, f"full {way}")


@pytest.mark.parametrize(
    ("chunk", "at_once"),
    [
        pytest.param(chunk, at_once, marks=[] if (chunk, at_once) == (64, 24) else pytest.mark.full)
        for chunk, at_once in product(CHUNKS, (1, 24))
    ],
)
async def test_prompts_that_share_prefixes(
    house: House, references: ReferenceFile, judge: Judge, chunk: int, at_once: int
) -> None:
    """They leave the common prefix around block boundaries; sealed blocks of it are shared, never written."""
    shared = references.of_kind("shared")
    async with Client(house.chunk_64 if chunk == 64 else house.chunk_2048) as client:
        ask = Asker(client, f"shared {chunk} {at_once}")
        for reference, answer in zip(shared, await run(ask, shared, at_once), strict=True):
            judge.check(answer, reference)
        again = await run(ask, shared, at_once)
    for reference, answer in zip(shared, again, strict=True):
        judge.check(answer, reference)
        assert answer.timings["cached_tokens"] == (len(reference.prompt) - 1) // BLOCK * BLOCK
    house.wait_whole()


@pytest.mark.parametrize("max_tokens", [350, pytest.param(None, marks=pytest.mark.full)])
async def test_more_than_the_pool_holds(
    house: House, references: ReferenceFile, judge: Judge, max_tokens: int | None
) -> None:
    """Three answers outgrow the pool while they are generated: one is preempted and computed anew."""
    long = references.of_kind("long")
    before = house.nodes[3].metric("baton:num_preemptions_total")
    async with Client(house.small) as client:
        ask = Asker(client, f"preempted {max_tokens}")
        for reference, answer in zip(long, await run(lambda r: ask(r, max_tokens), long, len(long)), strict=True):
            judge.check(answer, reference, max_tokens)
    assert house.nodes[3].metric("baton:num_preemptions_total") > before
    house.wait_whole()


@pytest.mark.parametrize("every", [112, pytest.param(8, marks=pytest.mark.full)])
@pytest.mark.parametrize("chunk", CHUNKS)
async def test_four_samples_are_four_single_requests(
    house: House, references: ReferenceFile, chunk: int, every: int
) -> None:
    """Sample i of a request with a seed draws what a single request with seed + i draws."""
    fields = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 24}
    distinct = set()
    async with Client(house.chunk_64 if chunk == 64 else house.chunk_2048) as client:
        for i, reference in enumerate(references.of_kind("ids", "text")[every // 2 :: every]):
            seed, prompt = 1000 * i, list(reference.prompt)
            together = await client.complete(prompt, n=4, seed=seed, stream=bool(i % 2), **fields)
            singles = await asyncio.gather(*(client.complete(prompt, seed=seed + j, **fields) for j in range(4)))
            assert [together.tokens[j] for j in range(4)] == [single.tokens[0] for single in singles]
            assert [together.finishes[j] for j in range(4)] == [single.finishes[0] for single in singles]
            distinct |= {tuple(single.tokens[0]) for single in singles}
    assert len(distinct) > 3 * i, "seeds make hardly a difference"
