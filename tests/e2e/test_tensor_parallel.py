"""Nodes of several ranks: the same answers whatever the degrees of the two pools."""

from __future__ import annotations

import asyncio
from itertools import product
from pathlib import Path

import pytest
from transformers import GPT2Config, GPTNeoXConfig, Phi3Config

from tests.e2e.asked_twice import check_twice
from tests.e2e.cluster import Cluster, Node
from tests.e2e.random_model import SHAPE, made

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


MULTI_HEAD = {name: size for name, size in SHAPE.items() if name not in ("num_key_value_heads", "head_dim")}
PACKED = {
    "phi3": Phi3Config(**SHAPE, intermediate_size=96, sliding_window=32),
    "gpt_neox": GPTNeoXConfig(**MULTI_HEAD, intermediate_size=96),
    "gpt2": GPT2Config(n_embd=64, n_layer=2, n_head=8, **MULTI_HEAD),
}


@pytest.mark.parametrize(
    ("family", "prefill", "decode"),
    [
        ("phi3", 4, 1),
        pytest.param("phi3", 2, 4, marks=pytest.mark.full),
        pytest.param("gpt_neox", 2, 4, marks=pytest.mark.full),
        pytest.param("gpt2", 4, 2, marks=pytest.mark.full),
    ],
)
async def test_answers_of_models_with_packed_layers(family: str, prefill: int, decode: int, tmp_path: Path) -> None:
    folder, wanted = await asyncio.to_thread(made, PACKED[family], tmp_path)
    (tmp_path / "logs").mkdir()
    with Cluster(tmp_path / "logs") as cluster:
        model = f"--model={folder}", "--served-model-name=tiny"
        nodes = ranked(cluster, "prefill", prefill, *model), ranked(cluster, "decode", decode, *model)
        await check_twice(cluster, *nodes, wanted, model="tiny")


def ranked(cluster: Cluster, role: str, degree: int, *more: str) -> Node:
    flags = (f"--tensor-parallel-size={degree}", "--num-gpu-blocks-override=400", "--verify-transfers", *more)
    return cluster.node(role, role, *flags)  # type: ignore[arg-type]
