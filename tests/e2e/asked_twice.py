"""The same prompts twice, through a prefill and a decode node: the second time from both prefix caches."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tests.e2e import reference_file
from tests.e2e.client import Client
from tests.e2e.cluster import Cluster, Node, wait_whole
from tests.e2e.reference_file import Reference
from tests.summary import COMPARED, EXPERT_TIES

MAX_TOKENS = 24


async def check_twice(
    cluster: Cluster, prefill: Node, decode: Node, cases: slice | Sequence[Reference], model: str = "baton-tiny"
) -> list[tuple[str, int]]:
    """Assert that answers are those of transformers, that there are hits on both nodes the second time, and that blocks
    and slots are whole then. cases: references of more than a block, EOS ignored; a slice: of baton-tiny's of kind
    `ids`. A mixture's answer may leave its reference where a router's choice was nearly a tie. Returns properties for
    the test's record."""
    if isinstance(cases, slice):
        cases = reference_file.load().of_kind("ids")[cases]
    router = cluster.router([prefill], [decode], "--policy=least-loaded")
    await asyncio.to_thread(router.wait_ready)
    num_ties = 0
    async with Client(router) as client:
        for turn in range(2):
            asked = (
                client.complete(list(case.prompt), model=model, max_tokens=length(case), ignore_eos=True)
                for case in cases
            )
            answers = await asyncio.gather(*asked)
            assert [a.error for a in answers] == [None] * len(cases)
            found = [c.difference(a.tokens[0], length(c)) for c, a in zip(cases, answers, strict=True)]
            differences = [difference for difference in found if difference is not None]
            assert not [str(difference) for difference in differences if not difference.is_expert_tie]
            num_ties += len(differences)
            assert any(answer.timings["decode_cached_tokens"] for answer in answers) == bool(turn)
            assert bool(prefill.metric("baton:prefix_cache_hits_total")) == bool(turn)
    await asyncio.to_thread(wait_whole, (prefill, decode))
    return [(COMPARED, 2 * len(cases)), (EXPERT_TIES, num_ties)]


def length(case: Reference) -> int:
    return min(len(case.output), MAX_TOKENS)
