"""Prefill nodes of several stages: the same answers whatever the stages, and the degrees of both pools."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from tests.e2e.asked_twice import check_twice
from tests.e2e.cluster import Cluster

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
        await check_twice(
            cluster,
            cluster.node("prefill", "prefill", *staged, "--max-num-batched-tokens=64", *COMMON),
            cluster.node("decode", "decode", f"--tensor-parallel-size={decode}", *COMMON),
            PROMPTS,
        )
