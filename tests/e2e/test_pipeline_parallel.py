"""Prefill nodes of several stages: the same answers whatever the stages, and the degrees of both pools."""

from __future__ import annotations

import asyncio
from itertools import product
from pathlib import Path

import pytest

from tests.e2e import reference_file
from tests.e2e.client import Client
from tests.e2e.cluster import Cluster
from tests.e2e.test_tensor_parallel import length

pytestmark = pytest.mark.timeout(300)

CI = {(2, 1, 1), (2, 2, 2)}
ALL = [*product((2, 3), (1, 2, 4), (1, 2, 4)), (5, 1, 1), (5, 1, 2)]
LAYOUTS = [pytest.param(*layout, marks=[] if layout in CI else pytest.mark.full) for layout in ALL]
PROMPTS = slice(40, 76, 3)
"""Of 19 to 260 tokens: of several blocks, and in chunks, so that stages have different steps."""
COMMON = ("--num-gpu-blocks-override=400", "--verify-transfers")


@pytest.mark.parametrize(("stages", "prefill", "decode"), LAYOUTS)
async def test_answers_are_those_of_transformers(tmp_path: Path, stages: int, prefill: int, decode: int) -> None:
    """baton-tiny has five layers and two KV heads. Blocks and slots are whole after it."""
    staged = (f"--pipeline-parallel-size={stages}", f"--tensor-parallel-size={prefill}")
    with Cluster(tmp_path) as cluster:
        nodes = [
            cluster.node("prefill", "prefill", *staged, "--max-num-batched-tokens=64", *COMMON),
            cluster.node("decode", "decode", f"--tensor-parallel-size={decode}", *COMMON),
        ]
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
                hits = sum(node.metric("baton:prefix_cache_hits_total") for node in nodes)
                assert turn == 0 or hits > 0
        for node in nodes:
            await asyncio.to_thread(node.wait_whole)
