"""Nodes of several ranks: the same answers whatever the degrees of the two pools."""

from __future__ import annotations

import asyncio
from itertools import product
from pathlib import Path

import pytest

from tests.e2e import reference_file
from tests.e2e.client import Client
from tests.e2e.cluster import Cluster, Node

pytestmark = pytest.mark.timeout(300)

CI = {(2, 4), (4, 1), (1, 2)}
DEGREES = [pytest.param(*pair, marks=[] if pair in CI else pytest.mark.full) for pair in product((1, 2, 4), repeat=2)]
PROMPTS = slice(0, 76, 4)
"""From one token to some 200: within a block, and over several."""
MAX_TOKENS = 24


@pytest.mark.parametrize(("prefill", "decode"), DEGREES)
async def test_answers_are_those_of_transformers(tmp_path: Path, prefill: int, decode: int) -> None:
    """baton-tiny has two KV heads, so four ranks hold each twice. Blocks and slots are whole after it."""
    with Cluster(tmp_path) as cluster:
        nodes = [ranked(cluster, "prefill", prefill), ranked(cluster, "decode", decode)]
        router = cluster.router(nodes[:1], nodes[1:], "--policy=least-loaded")
        await asyncio.to_thread(router.wait_ready)
        cases = reference_file.load().of_kind("ids")[PROMPTS]
        async with Client(router) as client:
            for turn in range(2):  # again, with the prompts' KV in both prefix caches
                asked = (client.complete(list(c.prompt), max_tokens=length(c), ignore_eos=True) for c in cases)
                answers = await asyncio.gather(*asked)
                assert [a.error for a in answers] == [None] * len(cases)
                wrong = [c for c, a in zip(cases, answers, strict=True) if tuple(a.tokens[0]) != c.output[: length(c)]]
                assert not wrong
                hits = [answer.timings["decode_cached_tokens"] for answer in answers]
                assert any(hits) == bool(turn)
                assert bool(nodes[0].metric("baton:prefix_cache_hits_total")) == bool(turn)
        for node in nodes:
            await asyncio.to_thread(node.wait_whole)


def length(case: reference_file.Reference) -> int:
    return min(len(case.output), MAX_TOKENS)


def ranked(cluster: Cluster, role: str, degree: int) -> Node:
    size = f"--tensor-parallel-size={degree}"
    return cluster.node(role, role, size, "--num-gpu-blocks-override=400", "--verify-transfers")  # type: ignore[arg-type]
