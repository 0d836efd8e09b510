"""An engine with a KV cache of 8 bits: the same tokens as transformers over rounded keys and values, whatever the
batch, the chunks, the prefix cache and forks do."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.layout import KvLayout, as_quantized
from engine.config import EngineConfig
from engine.engine import Engine
from engine.model.kv_pool import KvPool
from engine.model.load.checkpoint import Checkpoint
from engine.model.load.loader import load_model
from engine.model.probe import probe
from engine.model.runner import TorchModelRunner
from tests.engine import tiny_models
from tests.engine.test_parity import MAX_TOKENS, ask, run
from tools.rounded_kv import ROUNDED_KV

torch.set_num_threads(1)

LENGTHS = (1, 3, 15, 16, 17, 40, 100, 130)
NEAR_TIE = 1e-3
"""Of logits: where a key lies between two values of 8 bits, the last bit of fp32 decides."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tiny_models.CONFIGS["llama"], tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(3)
    shared = torch.randint(3, tiny_models.VOCAB_SIZE, (64,), generator=generator).tolist()
    drawn = [torch.randint(3, tiny_models.VOCAB_SIZE, (n,), generator=generator).tolist() for n in LENGTHS]
    return [tuple(shared[: len(tokens) // 2] + tokens[len(tokens) // 2 :]) for tokens in drawn]


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[tuple[int, ...]]) -> list[tuple[list[int], list[float]]]:
    """Greedy answers, and by how much each token's logit is above the next."""
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation=ROUNDED_KV).eval()
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        done = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = [logits[0].topk(2).values.tolist() for logits in done.logits]
        answers.append((done.sequences[0, len(prompt) :].tolist(), [first - second for first, second in best]))
    return answers


def make_engine(folder: Path, device: str = "cpu", **sizes: Any) -> tuple[Engine, KvPool]:
    plain: dict[str, Any] = {"num_blocks": 200, "max_model_len": 256, "block_size": 16, **sizes}
    config = EngineConfig(vocab_size=tiny_models.VOCAB_SIZE, eos_token_ids=(tiny_models.EOS,), **plain)
    model = load_model(Checkpoint.open(folder), device=torch.device(device))
    probed = probe(model, config.max_model_len)
    runner = TorchModelRunner(model, config, dataclasses.replace(probed, kv=tuple(map(as_quantized, probed.kv))))
    return Engine(config, runner), runner.pool


def check(said: list[int], expected: tuple[list[int], list[float]]) -> int:
    """Assert that the answers agree but for a near tie. Returns 1 for one, else 0."""
    tokens, margins = expected
    for at, (mine, theirs) in enumerate(zip(said, tokens, strict=False)):
        if mine != theirs:
            assert margins[at] <= NEAR_TIE, f"token {at} is {mine}, not {theirs}, which is better by {margins[at]}"
            return 1
    assert len(said) == len(tokens)
    return 0


@pytest.mark.parametrize(("budget", "block_size"), [(7, 16), (64, 4), (2048, 16)])
def test_chunks_and_prefix_hits(
    folder: Path,
    prompts: list[tuple[int, ...]],
    expected: list[tuple[list[int], list[float]]],
    budget: int,
    block_size: int,
) -> None:
    engine, _ = make_engine(folder, max_num_batched_tokens=budget, num_blocks=3200 // block_size, block_size=block_size)
    for turn in range(2):
        seqs = [ask(str(i), prompt) for i, prompt in enumerate(prompts)]
        said = run(engine, seqs)
        assert sum(check(said[str(i), 0], answer) for i, answer in enumerate(expected)) <= 1
        if turn:
            assert sum(seq.num_cached_tokens for seq in seqs) > 200


def test_forks_copy_scales_too(
    folder: Path, prompts: list[tuple[int, ...]], expected: list[tuple[list[int], list[float]]]
) -> None:
    engine, _ = make_engine(folder)
    said = run(engine, [ask("forked", prompts[5], samples=3)])
    for sample in range(3):
        check(said["forked", sample], expected[5])


def test_a_block_is_half_as_large(folder: Path) -> None:
    _, pool = make_engine(folder)
    model = load_model(Checkpoint.open(folder), device=torch.device("cpu"))
    layers = probe(model, 256).kv
    plain, own = KvLayout(layers, 16, "f"), KvLayout(pool.layers, 16, "f")
    head_dim = layers[0].head_dim_k
    assert own.block_bytes * 4 * head_dim == plain.block_bytes * (head_dim + 1)
    assert pool.as_bytes().shape == (200, own.block_bytes)
    keys, values = pool.layer(1)
    assert keys.shape == values.shape == (200, layers[0].num_kv_heads, 16, head_dim)
    assert keys.dtype == torch.float8_e4m3fn


@pytest.mark.gpu
def test_a_gpu_says_the_same(
    folder: Path, prompts: list[tuple[int, ...]], expected: list[tuple[list[int], list[float]]]
) -> None:
    engine, _ = make_engine(folder, "cuda", max_num_batched_tokens=64)
    said = run(engine, [ask(str(i), prompt) for i, prompt in enumerate(prompts)])
    assert sum(check(said[str(i), 0], answer) for i, answer in enumerate(expected)) <= 1
