"""Mixtures of experts on nodes of several ranks: the answers of transformers, however each pool divides its experts."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, GptOssConfig, Qwen3MoeConfig

from engine.checkpoint import EMBEDDED
from tests.e2e import references
from tests.e2e.asked_twice import check_twice
from tests.e2e.cluster import Cluster, Node, wait_until
from tests.e2e.random_model import MAX_TOKENS, NUM_PROMPTS, SEED, SHAPE, made
from tests.e2e.reference_file import NEAR_TIE, Reference

pytestmark = pytest.mark.timeout(300)

MOE = "baton-tiny-moe"
YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 16}
WAYS = ("1", "tp2", "tp4", "ep2", "ep4")
"""Ranks, and whether each has a part of every expert or some of them whole."""
CI = {(MOE, "ep2", "tp4"), (MOE, "1", "ep4"), ("qwen3_moe", "tp2", "ep4")}
CASES = [
    pytest.param(*case, marks=[] if case in CI else pytest.mark.full)
    for family in (MOE, "gpt_oss", "qwen3_moe")
    for prefill in WAYS
    for decode in WAYS
    if (case := (family, prefill, decode))
]


@pytest.mark.parametrize(("family", "prefill", "decode"), CASES)
async def test_answers_are_those_of_transformers(
    family: str, prefill: str, decode: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Blocks and slots are whole after it."""
    folder, wanted = await asyncio.to_thread(*(embedded,) if family == MOE else (made, config_of(family), tmp_path))
    (tmp_path / "logs").mkdir()
    with Cluster(tmp_path / "logs") as cluster:
        nodes = node(cluster, folder, "prefill", prefill), node(cluster, folder, "decode", decode)
        for name, count in await check_twice(cluster, *nodes, wanted, model="tiny"):
            record_property(name, count)
        for each, way in zip(nodes, (prefill, decode), strict=True):
            metrics = each.metrics()
            assert 1 < metrics.sum("baton:expert_imbalance") < 8
            assert (metrics.sum("baton:expert_rank_imbalance") >= 1) == way.startswith("ep")
            assert metrics.sum("baton:expert_tokens_total") > 100
            assert (metrics.sum("baton:expert_exchange_seconds_total") > 0) == (way != "1")


async def test_no_answer_is_lost_or_changed_when_experts_change_places(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Every few steps, on both sides of a handoff. Both nodes say so, and blocks and slots are whole after it."""
    folder, wanted = await asyncio.to_thread(embedded)
    with Cluster(tmp_path) as cluster:
        prefill = node(cluster, folder, "prefill", "ep2", *eplb(2), "--max-num-batched-tokens=64")
        decode = node(cluster, folder, "decode", "ep2", *eplb(4))
        for name, count in await check_twice(cluster, prefill, decode, wanted[::2], model="tiny"):
            record_property(name, count)
        for each in (prefill, decode):
            await asyncio.to_thread(wait_until, functools.partial(why_not_rebalanced, each))
            assert 1 <= each.metric("baton:expert_rank_imbalance") < 2
            assert "experts rebalanced layers=" in each.log_tail(limit=10**6)
        assert decode.metric("baton:expert_rebalances_total") > 1, "its steps are many"


def eplb(num_redundant: int) -> list[str]:
    config = {"window_size": 4, "step_interval": 4, "num_redundant_experts": num_redundant}
    return ["--enable-eplb", f"--eplb-config={json.dumps(config)}"]


def why_not_rebalanced(each: Node) -> str | None:
    """A step's tokens may be out before its count."""
    count = each.metric("baton:expert_rebalances_total")
    return None if count else f"{each.name} has rebalanced {count:g} times"


def test_an_answer_may_differ_only_after_a_near_tie_of_experts() -> None:
    reference = Reference("ids", (1,), (5, 6, 7), (1.0, 1.0, 1.0), 3, True, "length", (1e-2, 1e-5, 1e-5))
    at = {
        index: reference.difference([*reference.output[:index], 9, *reference.output[index + 1 :]])
        for index in (0, 1, 2)
    }
    assert [difference is not None and difference.is_expert_tie for difference in at.values()] == [False, True, True]
    dense = Reference("ids", (1,), (5,), (1.0,), 1, True, "length").difference([9])
    assert dense is not None
    assert not dense.is_expert_tie


def test_margins_of_experts_are_the_least_so_far() -> None:
    _, wanted = embedded()
    for reference in wanted:
        assert len(reference.expert_margins) == len(reference.output)
        assert list(reference.expert_margins) == sorted(reference.expert_margins, reverse=True)
    assert all(0 < reference.expert_margins[-1] < 0.1 for reference in wanted)
    near = sum(reference.expert_margins[-1] <= NEAR_TIE for reference in wanted)
    assert near < NUM_PROMPTS // 2, "most answers must be held against their references without an excuse"


def node(cluster: Cluster, folder: Path, role: Any, way: str, *more: str) -> Node:
    flags = [f"--model={folder}", "--served-model-name=tiny", "--num-gpu-blocks-override=800", "--verify-transfers"]
    flags += [f"--tensor-parallel-size={way[-1]}"]
    flags += ["--enable-expert-parallel"] if way.startswith("ep") else []
    return cluster.node(role, role, *flags, "--cpu-threads=1", *more)


@functools.cache
def embedded() -> tuple[Path, list[Reference]]:
    """The embedded mixture, and what transformers makes of prompts in fp32: half are longer than its window of 128."""
    torch.set_num_threads(1)
    auto: Any = AutoModelForCausalLM
    folder = EMBEDDED[MOE]
    model = auto.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    model.generation_config = GenerationConfig()
    rng = Random(SEED)
    lengths = [int(24 * 25 ** (i / (NUM_PROMPTS - 1))) for i in range(NUM_PROMPTS)]  # 24 to 600
    prompts = [[rng.randrange(10, model.config.vocab_size) for _ in range(length)] for length in lengths]
    return folder, [references.generate(model, [], "ids", prompt, MAX_TOKENS, True) for prompt in prompts]


def config_of(family: str) -> Any:
    """Of a small mixture."""
    if family == "gpt_oss":
        own = {"sliding_window": 32, "num_local_experts": 8, "num_experts_per_tok": 3, "rope_parameters": YARN}
        return GptOssConfig(**SHAPE, intermediate_size=64, **own)
    return Qwen3MoeConfig(**SHAPE, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=3)
