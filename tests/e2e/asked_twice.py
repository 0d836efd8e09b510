"""The same prompts twice, through a prefill and a decode node: the second time from both prefix caches."""

from __future__ import annotations

import asyncio

from tests.e2e import reference_file
from tests.e2e.client import Client
from tests.e2e.cluster import Cluster, Node

MAX_TOKENS = 24


async def check_twice(cluster: Cluster, prefill: Node, decode: Node, prompts: slice) -> None:
    """Assert that answers are those of transformers, that there are hits on both nodes the second time, and that blocks
    and slots are whole then. prompts: of the references of kind `ids`."""
    router = cluster.router([prefill], [decode], "--policy=least-loaded")
    await asyncio.to_thread(router.wait_ready)
    cases = reference_file.load().of_kind("ids")[prompts]
    async with Client(router) as client:
        for turn in range(2):
            asked = (client.complete(list(c.prompt), max_tokens=length(c), ignore_eos=True) for c in cases)
            answers = await asyncio.gather(*asked)
            assert [a.error for a in answers] == [None] * len(cases)
            wrong = [c for c, a in zip(cases, answers, strict=True) if tuple(a.tokens[0]) != c.output[: length(c)]]
            assert not wrong
            assert any(answer.timings["decode_cached_tokens"] for answer in answers) == bool(turn)
            assert bool(prefill.metric("baton:prefix_cache_hits_total")) == bool(turn)
    for node in (prefill, decode):
        await asyncio.to_thread(node.wait_whole)


def length(case: reference_file.Reference) -> int:
    return min(len(case.output), MAX_TOKENS)
