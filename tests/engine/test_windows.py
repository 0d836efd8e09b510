"""Models with sliding windows keep only what is read: the same tokens as transformers', at every edge of a window, with
fewer blocks."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig

from baton.kv_groups import group_layers
from baton.layout import KvLayout, LayerKv
from engine.block_manager import NULL_BLOCK
from engine.config import EngineConfig
from engine.engine import Engine
from engine.model import fast
from engine.model.graphs import MAX_PROMPTS, decode_capture_sizes
from engine.model.load import loader
from engine.model.load.checkpoint import Checkpoint
from engine.model.probe import probe
from engine.model.runner import TorchModelRunner
from engine.step_padding import StepPadding
from tests.engine import tiny_models
from tests.engine.counting import Counting
from tests.engine.rank_threads import Load, ranked_runner
from tests.engine.test_parity import MAX_TOKENS, Outputs, ask, run

WINDOW = 20
MAX_MODEL_LEN = 160
GEMMA3 = Gemma3TextConfig(
    **tiny_models.SHAPE | {"num_hidden_layers": 7}, sliding_window=WINDOW, query_pre_attn_scalar=16
)
"""Six layers with a window and one without: seven groups of one layer each."""
FAMILIES = {name: tiny_models.CONFIGS[name] for name in ("gpt_oss", "gemma2", "mistral")} | {"gemma3": GEMMA3}
LENGTHS = (WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 3 * WINDOW + 3, 6 * WINDOW + 1)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(FAMILIES[request.param], tmp_path_factory.mktemp(request.param))


@cache
def prompts() -> list[tuple[int, ...]]:
    """Of the lengths that matter; all but the first begin alike."""
    rng = random.Random(3)
    shared = [rng.randrange(10, tiny_models.VOCAB_SIZE) for _ in range(max(LENGTHS))]
    fresh = [rng.randrange(10, tiny_models.VOCAB_SIZE) for _ in range(max(LENGTHS))]
    beginnings = [tuple(shared[: length - 3] + fresh[:3]) for length in LENGTHS[1:]]
    return [tuple(fresh[: LENGTHS[0]]), *beginnings]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return answers(folder)


def answers(folder: Path) -> list[list[int]]:
    """Greedy ones of transformers, each prompt alone, computed anew for each token."""
    model: Any = tiny_models.reference(folder)
    found = []
    for prompt in prompts():
        tokens = list(prompt)
        while len(tokens) < len(prompt) + MAX_TOKENS and tokens[-1] != tiny_models.EOS:
            with torch.inference_mode():
                tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        found.append(tokens[len(prompt) :])
    return found


def make_engine(folder: Path, device: str = "cpu", split: bool = True, **sizes: Any) -> tuple[Engine, TorchModelRunner]:
    model = loader.load_model(Checkpoint.open(folder), device=device)
    probed = probe(model, MAX_MODEL_LEN)
    if device == "cuda":  # transformers' own products of experts cannot be captured
        fast.apply(model, probed, MAX_MODEL_LEN)
    plain: dict[str, Any] = {"num_blocks": 2000, "max_model_len": MAX_MODEL_LEN, "block_size": 4, **sizes}
    if split:
        probed = dataclasses.replace(probed, groups=group_layers(probed.kv))
        plain["windows"] = KvLayout(probed.kv, 4, "", groups=probed.groups).windows
    config = EngineConfig(vocab_size=tiny_models.VOCAB_SIZE, eos_token_ids=(tiny_models.EOS,), **plain)
    runner = TorchModelRunner(model, config, probed)
    return Engine(config, runner), runner


def every_other(values: Sequence[Any]) -> list[Any]:
    """All families with all of these; in CI, each family with every other one."""
    return [
        pytest.param(family, *value, marks=[] if (i + j) % 2 == 0 else pytest.mark.full)
        for i, family in enumerate(FAMILIES)
        for j, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("folder", "budget", "block_size", "ahead"),
    every_other([(7, 4, True), (33, 16, False), (2048, 4, False)]),
    indirect=["folder"],
)
def test_the_same_tokens_at_the_edges_of_windows(
    folder: Path, expected: list[list[int]], budget: int, block_size: int, ahead: bool
) -> None:
    engine, _ = make_engine(folder, max_num_batched_tokens=budget, block_size=block_size, async_scheduling=ahead)
    assert engine.tables.shape.has_windows
    for turn in range(2):
        seqs = [ask(str(index), prompt) for index, prompt in enumerate(prompts())]
        said = run(engine, seqs)
        assert [said[str(index), 0] for index in range(len(seqs))] == expected
        if turn:  # all that the first turn computed is still there, also what has fallen behind windows
            assert [s.num_cached_tokens for s in seqs] == [(len(p) - 1) // block_size * block_size for p in prompts()]


def staged(config: Any) -> Any:
    """The same family with five layers at least."""
    num_layers = max(5, config.num_hidden_layers)
    return type(config)(**{**config.to_dict(), "num_hidden_layers": num_layers, "layer_types": None})


CI = {("gemma2", 2, 1), ("mistral", 3, 1), ("gpt_oss", 2, 2)}


@pytest.mark.parametrize(
    ("family", "stages", "tp"),
    [
        pytest.param(*case, marks=[] if case in CI else pytest.mark.full)
        for case in itertools.product(FAMILIES, (2, 3), (1, 2))
    ],
)
def test_stages_say_the_same(family: str, stages: int, tp: int, tmp_path: Path) -> None:
    """Each has some of the layers of some groups. Twice, the second time with prefixes that are still there."""
    folder = tiny_models.save(staged(FAMILIES[family]), tmp_path)
    plain = EngineConfig(
        num_blocks=2000, max_model_len=MAX_MODEL_LEN, vocab_size=tiny_models.VOCAB_SIZE, block_size=4,
        eos_token_ids=(tiny_models.EOS,), max_num_batched_tokens=33, async_scheduling=True, num_stages=stages,
    )  # fmt: skip
    checkpoint = Checkpoint.open(folder)
    kv = probe(loader.load_model(checkpoint), MAX_MODEL_LEN).kv
    config = dataclasses.replace(plain, windows=KvLayout(kv, 4, "", groups=group_layers(kv)).windows)
    assert config.table_shape.has_windows
    with ranked_runner(stages * tp, Load(folder, config, fused=True, num_stages=stages)) as (runner, ranks):
        engine, wanted = Engine(config, runner), answers(folder)
        assert sum(len(rank.pool.layers) for rank in ranks[::tp]) == len(kv)
        for turn in range(2):
            seqs = [ask(str(index), prompt) for index, prompt in enumerate(prompts())]
            said = run(engine, seqs)
            assert [said[str(index), 0] for index in range(len(seqs))] == wanted
            if turn:
                assert [s.num_cached_tokens for s in seqs] == [(len(p) - 1) // 4 * 4 for p in prompts()]


def test_a_hit_needs_only_the_last_window_of_layers_with_one(folder: Path, expected: list[list[int]]) -> None:
    """What is behind windows is evicted first, as nobody has it any more; then what is read."""
    engine, runner = make_engine(folder)
    shape, blocks = engine.tables.shape, engine.blocks
    index, prompt = len(LENGTHS) - 1, prompts()[-1]
    seq = ask("first", prompt)
    names = seq.block_hashes((len(prompt) - 1) // 4, 4)
    assert run(engine, [seq])["first", 0] == expected[index]
    hits, _ = engine.tables.match(names)
    assert shape.num_columns(4 * engine.tables.num_columns(hits)) == len(names)
    by_group = [hits[group :: shape.width] for group in range(shape.width)]
    kept = [sum(block != NULL_BLOCK for block in table) for table in by_group]
    assert kept == [len(names) if window is None else -(-(WINDOW - 1) // 4) for window in shape.windows]
    lost = by_group[-1][-1]  # of a window, or of all there is
    blocks.acquire([block for block in hits if block != lost])
    everything = blocks.allocate(blocks.num_unclaimed).blocks
    assert blocks.state(lost).value == "owned"
    shorter, _ = engine.tables.match(names)
    assert engine.tables.num_columns(shorter) < len(names)
    blocks.release(everything)
    blocks.release([block for block in hits if block != lost])
    assert run(engine, [again := ask("again", prompt)])["again", 0] == expected[index]
    assert again.num_cached_tokens == 4 * engine.tables.num_columns(shorter)
    assert runner.pool.num_blocks == 2000


@pytest.mark.parametrize(("folder", "ahead"), every_other([(False,), (True,)]), indirect=["folder"])
def test_a_pool_too_small_for_all_preempts_and_says_the_same(
    folder: Path, expected: list[list[int]], ahead: bool
) -> None:
    most = EngineConfig(
        num_blocks=2000, max_model_len=MAX_MODEL_LEN, vocab_size=9, block_size=4, max_num_batched_tokens=7,
        async_scheduling=ahead, windows=make_engine(folder)[0].config.windows,
    ).most_blocks(MAX_MODEL_LEN)  # fmt: skip
    engine, _ = make_engine(folder, num_blocks=most + 2, max_num_batched_tokens=7, async_scheduling=ahead)
    said = run(engine, [ask(str(index), prompt) for index, prompt in enumerate(prompts())])
    assert [said[str(index), 0] for index in range(len(LENGTHS))] == expected
    assert engine.blocks.num_claimed == 0


def test_samples_of_a_prompt_share_what_is_read(folder: Path) -> None:
    """Whoever has only one table says the same."""
    said = []
    for split in (True, False):
        engine, _ = make_engine(folder, split=split)
        asked = [ask(str(index), prompt, samples=3, temperature=0.8, seed=5) for index, prompt in enumerate(prompts())]
        said.append(run(engine, asked))
    assert said[0] == said[1]


def test_layers_keep_their_window_and_no_more(folder: Path) -> None:
    """At every step a sequence holds at most its window and what is under way, in each group that has one."""
    engine, _ = make_engine(folder, max_num_batched_tokens=8)
    shape, most = engine.tables.shape, 0
    engine.add(seq := ask("long", prompts()[-1]))
    while engine.has_work:
        engine.compute(engine.schedule(0.0))
        for group, window in enumerate(shape.windows):
            held = sum(block != NULL_BLOCK for block in seq.block_table[group :: shape.width])
            if window is not None:
                most = max(most, held)
    assert 0 < most <= shape.num_columns(WINDOW - 1 + 8) + 1


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [True, False])
def test_a_gpu_says_the_same(folder: Path, graphs: bool) -> None:
    """With one table and with several: the same kernels over other blocks."""
    said = list[Outputs]()
    sizes: dict[str, Any] = {"max_num_batched_tokens": 100, "async_scheduling": True, "block_size": 16}
    if graphs:
        sizes["padding"] = StepPadding(((0, (32, 64, 100)), (32, (32, 100))), MAX_PROMPTS)
    for split in (True, False):
        engine, runner = make_engine(folder, device="cuda", split=split, **sizes)
        if graphs:
            runner.capture(decode_capture_sizes(engine.config.max_num_seqs), MAX_MODEL_LEN)
        said.append(run(engine, [ask(str(index), prompt) for index, prompt in enumerate(prompts())]))
    assert said[0] == said[1]


# ---- counted, without a model ----


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_a_prompt_that_has_the_smallest_pool_keeps_all_stages_busy(stages: int) -> None:
    """All of its chunks are as long as the budget, with as many steps in flight as the engine launches."""
    sizes = EngineConfig(
        num_blocks=2000, max_model_len=MAX_MODEL_LEN, vocab_size=100, block_size=4, max_num_batched_tokens=12,
        async_scheduling=True, num_stages=stages, windows=(WINDOW,),
    )  # fmt: skip
    model = Counting()
    model.slow = True
    engine = Engine(dataclasses.replace(sizes, num_blocks=1 + sizes.most_blocks(MAX_MODEL_LEN)), model)
    engine.add(ask("long", tuple(range(156)), max_tokens=1))
    oldest = iter(model.steps)
    while engine.num_waiting or engine.device_busy_since is not None:
        while engine.has_room and (plan := engine.schedule(0.0)).chunks:
            engine.compute(plan, wait=False)
        engine.check_integrity()
        next(oldest).running = False
        engine.retire()
    assert [chunk.length for batch in model.batches for chunk in batch] == [12] * 13


@pytest.mark.parametrize(
    ("layers", "before", "computing", "generating"),
    [  # MiB of a sequence of 32,768 tokens, if a layer keeps 2 KiB for each
        ([None, 128] * 12, 1536, 819, 771),  # gpt-oss-20b
        (([1024] * 5 + [None]) * 8, 3072, 753, 592),  # Gemma 3 12B
        (([1024] * 5 + [None]) * 10 + [1024] * 2, 3968, 1002, 760),  # Gemma 3 27B: the last group has two layers less
        ([4096] * 32, 2048, 385, 256),  # Mistral 7B v0.1
    ],
)
def test_what_a_long_sequence_takes(layers: list[int | None], before: int, computing: int, generating: int) -> None:
    kv = tuple(LayerKv(4, 128, 128, "bfloat16", window) for window in layers)
    whole, split = (KvLayout(kv, 16, "", groups=groups) for groups in ((), group_layers(kv)))
    plain = EngineConfig(num_blocks=10**6, max_model_len=40_000, vocab_size=10)
    windowed = dataclasses.replace(plain, windows=split.windows)
    assert plain.most_blocks(32_768) * whole.block_bytes == before << 20
    assert plain.table_shape.num_held(32_768) * whole.block_bytes == before << 20
    assert round(windowed.most_blocks(32_768) * split.block_bytes / 2**20) == computing
    assert round(windowed.table_shape.num_held(32_768) * split.block_bytes / 2**20) == generating
