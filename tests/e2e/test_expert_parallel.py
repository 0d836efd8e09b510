"""Mixtures of experts on nodes of several ranks: the answers of transformers, however each pool divides its experts."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, GptOssConfig, Qwen3MoeConfig

from engine.checkpoint import EMBEDDED
from engine.model.load.checkpoint import Checkpoint
from tests.e2e import references
from tests.e2e.client import Client
from tests.e2e.cluster import Cluster, Node
from tests.e2e.reference_file import Reference

pytestmark = pytest.mark.timeout(300)

TINY = EMBEDDED["baton-tiny"]
MOE = "baton-tiny-moe"
SEED = 20_26
NUM_PROMPTS = 16
MAX_TOKENS = 20
WAYS = ("1", "tp2", "tp4", "ep2", "ep4")
"""Ranks, and whether each has a part of every expert or some of them whole."""
CI = {(MOE, "ep2", "tp4"), ("qwen3_moe", "tp2", "ep4")}
CASES = [
    pytest.param(*case, marks=[] if case in CI else pytest.mark.full)
    for family in (MOE, "gpt_oss", "qwen3_moe")
    for prefill in WAYS
    for decode in WAYS
    if (case := (family, prefill, decode))
]


@pytest.mark.parametrize(("family", "prefill", "decode"), CASES)
async def test_answers_are_those_of_transformers(family: str, prefill: str, decode: str, tmp_path: Path) -> None:
    """Twice, the second time from both prefix caches; blocks and slots are whole after it. In fp32 no two experts, and
    no two tokens, were as good as equal."""
    folder, wanted = await asyncio.to_thread(embedded if family == MOE else made, family, tmp_path)
    (tmp_path / "logs").mkdir()
    with Cluster(tmp_path / "logs") as cluster:
        nodes = [node(cluster, folder, "prefill", prefill), node(cluster, folder, "decode", decode)]
        router = cluster.router(nodes[:1], nodes[1:], "--policy=least-loaded")
        router.wait_nodes(1, 1)
        async with Client(router) as client:
            for turn in range(2):
                asked = (
                    client.complete(list(r.prompt), model="tiny", max_tokens=MAX_TOKENS, ignore_eos=True)
                    for r in wanted
                )
                answers = await asyncio.gather(*asked)
                assert [answer.error for answer in answers] == [None] * NUM_PROMPTS
                found = [r.difference(answer.tokens[0]) for r, answer in zip(wanted, answers, strict=True)]
                assert not [str(difference) for difference in found if difference is not None]
                assert any(answer.timings["decode_cached_tokens"] for answer in answers) == bool(turn)
        for each in nodes:
            await asyncio.to_thread(each.wait_whole)
            assert 1 < each.metrics().sum("baton:expert_imbalance") < 8


def node(cluster: Cluster, folder: Path, role: Any, way: str) -> Node:
    flags = [f"--model={folder}", "--served-model-name=tiny", "--num-gpu-blocks-override=400", "--verify-transfers"]
    flags += [f"--tensor-parallel-size={way[-1]}"]
    flags += ["--enable-expert-parallel"] if way.startswith("ep") else []
    return cluster.node(role, role, *flags, "--cpu-threads=1")


def embedded(name: str, _: Path) -> tuple[Path, list[Reference]]:
    """The embedded mixture, and what transformers makes of prompts in fp32: most are longer than its window."""
    torch.set_num_threads(1)
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(EMBEDDED[name], dtype=torch.float32, local_files_only=True).eval()
    model.generation_config = GenerationConfig()
    rng = Random(SEED)
    lengths = [int(10 * 60 ** (i / (NUM_PROMPTS - 1))) for i in range(NUM_PROMPTS)]  # 10 to 600
    prompts = [[rng.randrange(10, model.config.vocab_size) for _ in range(length)] for length in lengths]
    return EMBEDDED[name], [references.generate(model, [], "ids", prompt, MAX_TOKENS, True) for prompt in prompts]


def made(family: str, root: Path) -> tuple[Path, list[Reference]]:
    """A small random mixture with baton-tiny's tokenizer, the same each time, and what transformers makes of prompts
    in fp32."""
    tokenizer = Checkpoint.open(TINY)
    shape: dict[str, Any] = {
        "vocab_size": tokenizer.vocab_size,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "initializer_range": 0.2,  # logits far apart, and experts
    }
    config: Any = (
        GptOssConfig(**shape, intermediate_size=64, sliding_window=32, num_local_experts=8, num_experts_per_tok=3)
        if family == "gpt_oss"
        else Qwen3MoeConfig(**shape, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=3)
    )
    folder = root / "model"
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.normal_(0, 0.2)
    model.save_pretrained(folder)
    for file in TINY.glob("*token*"):
        shutil.copy(file, folder)
    model.generation_config = GenerationConfig()
    rng = Random(SEED)
    prompts = [
        [rng.randrange(10, tokenizer.vocab_size) for _ in range(rng.randrange(1, 120))] for _ in range(NUM_PROMPTS)
    ]
    return folder, [references.generate(model, [], "ids", prompt, MAX_TOKENS, True) for prompt in prompts]
