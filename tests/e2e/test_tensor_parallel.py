"""Nodes of several ranks: the same answers whatever the degrees of the two pools."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from tests.e2e.asked_twice import check_twice
from tests.e2e.cluster import Cluster, Node

pytestmark = pytest.mark.timeout(300)

CI = {(2, 4), (4, 1), (1, 2)}
DEGREES = [pytest.param(*pair, marks=[] if pair in CI else pytest.mark.full) for pair in product((1, 2, 4), repeat=2)]
PROMPTS = slice(0, 76, 4)
"""From one token to some 200: within a block, and over several."""


@pytest.mark.parametrize(("prefill", "decode"), DEGREES)
async def test_answers_are_those_of_transformers(tmp_path: Path, prefill: int, decode: int) -> None:
    """baton-tiny has two KV heads, so four ranks hold each twice. Blocks and slots are whole after it."""
    with Cluster(tmp_path) as cluster:
        nodes = ranked(cluster, "prefill", prefill), ranked(cluster, "decode", decode)
        await check_twice(cluster, *nodes, PROMPTS)


def ranked(cluster: Cluster, role: str, degree: int) -> Node:
    size = f"--tensor-parallel-size={degree}"
    return cluster.node(role, role, size, "--num-gpu-blocks-override=400", "--verify-transfers")  # type: ignore[arg-type]
