"""Experts that change places between a node's ranks while requests stream: every answer is that of transformers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.asked_twice import check_twice
from tests.e2e.cluster import Cluster, Node, wait_until
from tests.e2e.test_expert_parallel import embedded

pytestmark = pytest.mark.timeout(300)

STEP_INTERVAL = 4
"""Steps between two decisions, so that experts change places several times in each answer."""


async def test_no_answer_is_lost_or_changed_when_experts_move(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """On both sides of a handoff, with two copies of two experts and of four; then both say how often."""
    folder, wanted = await asyncio.to_thread(embedded)
    with Cluster(tmp_path) as cluster:
        nodes = node(cluster, folder, "prefill", 2, 2), node(cluster, folder, "decode", 4, 4)
        for name, count in await check_twice(cluster, *nodes, wanted, model="tiny"):
            record_property(name, count)
        for each in nodes:
            await asyncio.to_thread(wait_until, lambda each=each: why_not_rebalanced(each))
            assert 1 <= each.metric("baton:expert_rank_imbalance") < 4


def why_not_rebalanced(each: Node) -> str | None:
    """The count is shown a moment later."""
    count = each.metric("baton:expert_rebalances_total")
    return None if count >= 2 else f"{each.name} has rebalanced {count:g} times"


def node(cluster: Cluster, folder: Path, role: str, size: int, num_redundant: int) -> Node:
    config = {"window_size": STEP_INTERVAL, "step_interval": STEP_INTERVAL, "num_redundant_experts": num_redundant}
    flags = [f"--model={folder}", "--served-model-name=tiny", "--num-gpu-blocks-override=400", "--verify-transfers"]
    flags += [f"--tensor-parallel-size={size}", "--enable-expert-parallel", "--max-num-batched-tokens=128"]
    flags += ["--enable-eplb", f"--eplb-config={json.dumps(config)}", "--cpu-threads=1"]
    return cluster.node(role, role, *flags)  # type: ignore[arg-type]
