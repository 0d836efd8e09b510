"""A model divided among ranks: logits and KV are those of one rank, whatever the family and the degree."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch._C._distributed_c10d import HashStore
from transformers import CohereConfig, Gemma3nTextConfig, LlamaConfig, PhiConfig, PreTrainedModel

from baton.layout import KvSlice
from baton.messages import AttemptId
from baton.sampling import SamplingParams
from engine.engine import Engine
from engine.model.batch import singles_first
from engine.model.errors import UnsupportedModel
from engine.model.load import loader
from engine.model.load.checkpoint import Checkpoint
from engine.model.load.skeleton import build_skeleton
from engine.model.parallel import sequence_parallel
from engine.model.parallel.cut import Cut
from engine.model.parallel.group import GlooRanks, RankGroup
from engine.model.parallel.part import RankPart
from engine.model.parallel.pipeline import Pipeline
from engine.model.parallel.sequence_parallel import RowMemory
from engine.model.parallel.sharding import Place, kv_slice, shard
from engine.model.runner import TorchModelRunner
from engine.sequence import Sequence
from engine.step import Chunk
from tests.engine import tiny_models
from tests.engine.rank_threads import Load, in_threads, ranked_runner
from tests.engine.shared_rows import DividedRows
from tests.engine.test_model_families import SIZES, sequences
from tests.engine.test_parity import ask, run

torch.set_num_threads(1)

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
CI = {("llama", 2, True), ("qwen2", 4, False), ("qwen3", 8, True), ("mistral", 2, False)}
CASES = [
    pytest.param(family, size, fused, marks=[] if (family, size, fused) in CI else pytest.mark.full)
    for family in FAMILIES
    for size in (2, 4, 8)
    for fused in (False, True)
]


class LogitsOf(TorchModelRunner):
    """Says the logits of each chunk that samples, decodes first, as the sampler gets them."""

    @torch.inference_mode()
    def __call__(self, *chunks: Chunk) -> list[torch.Tensor]:
        self._rebalance()
        ordered = singles_first(chunks)
        step = self._as_numbers(ordered, *self._input_batch.place(ordered), [])
        if self._staged is None:
            return [row.clone() for row in self._compute(step, None, lambda *_: None)]
        rows: list[torch.Tensor] = []
        self._begin(self._staged, chunks, step, lambda *_: None, rows.extend)  # type: ignore[arg-type]
        self._staged.settle()
        return rows


def logits_and_kv(size: int, load: Load) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Of a prompt in chunks beside decodes: [num_logits, vocab_size], and of each of the `size` ranks its pool."""
    with ranked_runner(size, load, LogitsOf) as (runner, ranks):
        assert isinstance(runner, LogitsOf)
        for rank in ranks:
            rank.pool.tensor[1:] = float("nan")  # whatever is read must have been written before
        a, b, c = sequences([70, 33, 100])
        assert runner(Chunk.of(a, 0, 30), Chunk.of(b, 0, 32)) == []
        rows = runner(Chunk.of(b, 32, 1), Chunk.of(a, 30, 40), Chunk.of(c, 0, 99))
        rows += runner(Chunk.of(c, 99, 1))
        return torch.stack(rows), [rank.pool.tensor.clone() for rank in ranks]


def check_same(folder: Path, size: int, *, fused: bool, whole_experts: bool = False) -> None:
    alone, divided = (Load(folder, SIZES, fused=fused, whole_experts=whole) for whole in (False, whole_experts))
    one, (whole,) = logits_and_kv(1, alone)
    several, pools = logits_and_kv(size, divided)
    done = [{name: tally.fused for name, tally in report.pieces.items()} for report in alone.reports + divided.reports]
    for pieces, is_divided in zip(done, [False, *[True] * size], strict=False):
        assert (pieces.pop("sum_norm") > 0) == (is_divided and pieces["residual_norm"] > 0)
        assert pieces.pop("expert_sum") == 0 or not is_divided  # its parts are of one rank
    assert not any(report.pieces["sum_norm"].refused for report in divided.reports)
    assert done == done[:1] * ((1 + size) * fused)
    error = (several - one).norm(dim=-1) / one.norm(dim=-1)
    assert several.shape == one.shape
    assert float(error.max()) < 1e-5
    num_heads = whole.shape[3]
    for rank, pool in enumerate(pools):
        held = kv_slice(Checkpoint.open(folder).text_config, rank, size)
        assert held.head_end <= num_heads
        mine = whole[:, :, :, held.head_start : held.head_end]
        torch.testing.assert_close(pool, mine, atol=1e-4, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize(("family", "size", "fused"), CASES)
def test_logits_and_kv_are_those_of_one_rank(family: str, size: int, fused: bool, tmp_path: Path) -> None:
    """With 8 heads and 2 KV heads, four ranks hold each KV head twice."""
    check_same(tiny_models.save(tiny_models.CONFIGS[family], tmp_path), size, fused=fused)


@pytest.mark.parametrize("ties", [True, False])
def test_a_vocabulary_that_cannot_be_divided_evenly(ties: bool, tmp_path: Path) -> None:
    """The last rank's rows beyond it are no tokens. Biases are added once, also those of layers that are sums."""
    shape = {**tiny_models.SHAPE, "vocab_size": 161, "tie_word_embeddings": ties}
    folder = tiny_models.save(LlamaConfig(**shape, attention_bias=True, mlp_bias=True), tmp_path)
    fill_biases(folder)
    check_same(folder, 4, fused=not ties)


@pytest.mark.parametrize("ties", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_head_with_a_bias(ties: bool, tmp_path: Path) -> None:
    """Also for a vocabulary that cannot be divided evenly."""
    config = PhiConfig(**{**tiny_models.SHAPE, "vocab_size": 161, "tie_word_embeddings": ties})
    folder = tiny_models.save(config, tmp_path)
    fill_biases(folder)
    check_same(folder, 4, fused=False)


def test_a_norm_with_weights_for_each_head(tmp_path: Path) -> None:
    """Of Command R+; four ranks hold each KV head twice."""
    folder = tiny_models.save(CohereConfig(**{**tiny_models.SHAPE, "head_dim": 8}, use_qk_norm=True), tmp_path)
    fill_biases(folder)
    check_same(folder, 4, fused=True)


def test_a_rank_without_a_token_has_zeros(tmp_path: Path) -> None:
    """Of nine tokens each of eight ranks has two, so that the last ones have none."""
    shape = {**tiny_models.SHAPE, "vocab_size": 9, "eos_token_id": 2}
    folder = tiny_models.save(LlamaConfig(**shape), tmp_path)
    models: dict[int, Any] = {}

    def run(group: RankGroup) -> None:
        models[group.rank] = loader.load_model(Checkpoint.open(folder), part=RankPart(group))

    with in_threads(8, run) as group:
        run(group)
    assert models[4].lm_head.weight[0].any()
    assert not models[4].lm_head.weight[1].any()
    for rank in (5, 7):
        assert not models[rank].lm_head.weight.any()
        assert not models[rank].model.embed_tokens.weight.any()


def test_a_rank_reads_and_keeps_its_part_alone(tmp_path: Path) -> None:
    folder = tiny_models.save(tiny_models.CONFIGS["llama"], tmp_path)
    whole, models = check_parts(folder, 4, head_dim=16)
    total = sum(parameter.numel() for parameter in whole.values())
    for model in models:  # more than a quarter: each KV head is on two ranks, norms are on all
        assert sum(parameter.numel() for parameter in model.parameters()) < 0.3 * total


def check_parts(
    folder: Path, size: int, head_dim: int, quantization: str | None = None
) -> tuple[dict[str, torch.Tensor], list[PreTrainedModel]]:
    """The whole model's parameters, and the models of all ranks, which have exactly their parts of these."""
    load = Load(folder, SIZES, fused=False, quantization=quantization)
    whole = parameters(loader.load_model(Checkpoint.open(folder), quantization=quantization))
    models: dict[int, PreTrainedModel] = {}

    def run(group: RankGroup) -> None:
        models[group.rank], _ = load(Pipeline(group, 1))

    with in_threads(size, run) as group:
        run(group)
    for rank, model in models.items():
        own = parameters(model)
        assert own.keys() == whole.keys()
        for name, part in own.items():
            expected = own_part(name, whole[name], rank, size, head_dim)
            assert torch.equal(part, expected), f"{name} of rank {rank}"
    return whole, [models[rank] for rank in range(size)]


ENGINES = [("qwen3", False, False), ("qwen3", True, False), ("qwen3", True, True), ("phi3", True, True)]


@pytest.mark.parametrize(("family", "ahead", "divided"), ENGINES)
def test_an_engine_says_the_same_over_several_ranks(
    family: str, ahead: bool, divided: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With prefix hits, forks whose last block is copied, prompt logprobs, preemptions, and a request that leaves;
    also where the next step takes tokens that only the device of rank 0 knows, and where rows are divided."""
    monkeypatch.setattr(sequence_parallel, "TILE_ROWS", 2)
    groups: list[DividedRows] = []
    shared: dict[int, RowMemory] = {}

    def over(group: GlooRanks) -> RankGroup:
        groups.append(DividedRows(group, shared))
        return groups[-1] if divided else group

    folder = tiny_models.save(tiny_models.CONFIGS[family], tmp_path)
    config = dataclasses.replace(
        SIZES, num_blocks=26, max_num_batched_tokens=32, max_model_len=64, block_size=4, async_scheduling=ahead
    )
    said = []
    for size in (1, 2):
        with ranked_runner(size, Load(folder, config, fused=True), over=over) as (runner, _):
            said.append(story(Engine(config, runner)))
    assert said[0] == said[1]
    assert all((group.num_steps > 10) == divided for group in groups)


def story(engine: Engine) -> tuple[dict[tuple[str, int], list[int]], list[Any], int]:
    """Tokens by request and sample, ranks and tokens of prompt logprobs, and how often there was no room."""
    tokens: dict[tuple[str, int], list[int]] = {}
    scored: list[Any] = []
    plain, forks, asks, leaves = (request(name, n) for n, name in enumerate(("plain", "forks", "asks", "leaves")))
    again = request("again", 0)  # as plain
    forks.samples = [0, 1, 2]
    asks.num_prompt_logprobs = 2
    for seq in (plain, forks, asks, leaves):
        engine.add(seq)
    for turn in range(400):
        result = engine.compute(engine.schedule(float(turn)))
        engine.check_integrity()
        for token in result.sampled:
            tokens.setdefault((token.sequence.attempt_id.request_id, token.sample), []).append(token.token)
        scored += [(entry.rank, entry.top[0][0]) for _, piece in result.prompt_logprobs for entry in piece]
        if turn == 6:
            engine.sequences.release(leaves)
            engine.add(again)
        if not engine.has_work:
            break
    assert not engine.has_work
    assert engine.blocks.num_free + engine.blocks.num_cached == engine.blocks.num_total
    assert {len(output) for (name, _), output in tokens.items() if name != "leaves"} == {12}
    assert again.num_cached_tokens > 0
    assert engine.num_preemptions > 0
    return tokens, scored, engine.num_preemptions


def request(name: str, number: int) -> Sequence:
    generator = torch.Generator().manual_seed(number)
    prompt = tuple(torch.randint(10, tiny_models.VOCAB_SIZE, (25,), generator=generator).tolist())
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    return Sequence(AttemptId(1, name, 0), [0], prompt, sampling)


def fill_biases(folder: Path) -> None:
    """And norms: transformers' initializers make them zero, or one."""
    weights = load_file(folder / "model.safetensors")
    torch.manual_seed(2)
    for name, tensor in weights.items():
        if name.endswith(("bias", "sinks", "norm.weight")):
            weights[name] = torch.randn_like(tensor)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def parameters(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


def own_part(name: str, whole: torch.Tensor, rank: int, size: int, head_dim: int) -> torch.Tensor:
    """As tensor parallel is known, written down once more: of a llama with 2 KV heads."""
    if "norm" in name:
        return whole
    if "k_proj" in name or "v_proj" in name:
        first, num = rank * 2 // size, max(1, 2 // size)
        return whole[first * head_dim : (first + num) * head_dim]
    return whole.chunk(size, dim=1 if "o_proj" in name or "down_proj" in name else 0)[rank]


def test_a_rank_that_waits_for_others_gives_up_in_time() -> None:
    """Not only when gloo does, which holds Python's lock while it waits."""
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        GlooRanks(HashStore(), 0, 2, timeout_s=0.2)
    assert time.monotonic() - began < 10


# ---- what cannot be divided ----

SIX_KV_HEADS = {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 6}


@pytest.mark.parametrize(
    ("family", "changes", "size", "why"),
    [
        ("llama", {}, 3, "llama: 8 attention heads cannot be divided among 3 ranks"),
        (
            "llama",
            {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 6},
            4,
            "llama: 6 KV heads cannot be divided",
        ),
        ("llama", {"intermediate_size": 90}, 4, "model.layers.0.mlp.gate_proj: 90 features cannot be divided among 4"),
        ("gemma2", {}, 16, "gemma2: 8 attention heads cannot be divided among 16 ranks"),
    ],
)
def test_what_cannot_be_divided_is_named(family: str, changes: dict[str, Any], size: int, why: str) -> None:
    config = tiny_models.CONFIGS[family]
    model = build_skeleton(type(config)(**{**config.to_dict(), **changes}), torch.float32, "eager")
    with pytest.raises(UnsupportedModel, match=re.escape(why)):
        shard(model, Place(0, size))


def test_a_style_that_is_not_known_is_refused() -> None:
    """Some later plan's, which would be computed wrongly."""
    model = build_skeleton(tiny_models.CONFIGS["llama"], torch.float32, "eager")
    model._tp_plan = {**model._tp_plan, "model.layers.*.mlp.up_proj": "packed_colwise"}
    with pytest.raises(UnsupportedModel, match=r"layers.0.mlp.up_proj has the tensor-parallel style packed_colwise"):
        shard(model, Place(0, 2))


def test_an_mlp_whose_features_depend_on_one_another_is_refused(tmp_path: Path) -> None:
    """Gemma 3n's keep those that are far above the mean of all."""
    sizes = {**tiny_models.SHAPE, "intermediate_size": [96, 96], "vocab_size_per_layer_input": tiny_models.VOCAB_SIZE}
    own = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8, "laurel_rank": 4, "sliding_window": 20}
    config = Gemma3nTextConfig(**sizes, **own, activation_sparsity_pattern=[0.0, 0.9])
    folder = tiny_models.save(config, tmp_path)

    def run(group: RankGroup) -> None:
        with pytest.raises(UnsupportedModel, match=r"model.layers.1.mlp: its features depend on one another"):
            loader.load_model(Checkpoint.open(folder), part=RankPart(group))

    with in_threads(2, run) as group:
        run(group)


# ---- which part ----


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 4), st.data())
def test_each_rank_has_whole_groups_of_heads_and_all_have_equally_many(
    kv_power: int, per_kv: int, size_power: int, data: st.DataObject
) -> None:
    """Each query head is where its KV head is; each KV head is held, by several ranks if there are fewer."""
    size, num_kv = 2**size_power, data.draw(st.sampled_from([2**kv_power, 3 * 2**kv_power]))
    num_heads = num_kv * per_kv
    heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv, "hidden_size": 8 * num_heads}
    config = LlamaConfig(**{**tiny_models.SHAPE, **heads})
    if num_heads % size or (num_kv % size and size % num_kv):
        with pytest.raises(UnsupportedModel):
            kv_slice(config, 0, size)
        return
    held = [kv_slice(config, rank, size) for rank in range(size)]
    assert {part.head_end - part.head_start for part in held} == {max(1, num_kv // size)}
    assert {head for part in held for head in range(part.head_start, part.head_end)} == set(range(num_kv))
    for rank, part in enumerate(held):
        own = range(rank * num_heads // size, (rank + 1) * num_heads // size)
        assert {head // per_kv for head in own} == set(range(part.head_start, part.head_end))
        assert part == KvSlice(0, config.num_hidden_layers, part.head_start, part.head_end)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 3), st.data())
def test_runs_are_the_elements_of_the_cut(shape: list[int], num_spans: int, data: st.DataObject) -> None:
    """Those of each span in their order, each once; rows beyond the tensor are not in it."""
    dim = data.draw(st.integers(0, len(shape) - 1))
    size, beyond = shape[dim], 3 if dim == 0 and num_spans == 1 else 0
    ends = st.tuples(*[st.integers(0, size + beyond)] * 2).map(sorted).map(lambda span: (span[0], span[1]))
    spans = tuple(data.draw(ends) for _ in range(num_spans))
    cut = Cut(dim, spans, tuple(shape))
    numbers = torch.arange(math.prod(shape)).view(shape)
    for (first, end), runs in zip(spans, cut.runs(), strict=True):
        own = numbers.narrow(dim, min(first, size), min(end, size) - min(first, size))
        found = [runs.first + run * runs.pitch + at for run in range(runs.num_runs) for at in range(runs.length)]
        assert found == own.flatten().tolist()
    assert cut.shape == (*shape[:dim], sum(end - first for first, end in spans), *shape[dim + 1 :])


def test_ranks_give_back_the_same_blocks_behind_windows(tmp_path: Path) -> None:
    """One layer has a window of 24, and one has none."""
    folder, said = tiny_models.save(tiny_models.CONFIGS["qwen2"], tmp_path), []
    prompts = [tuple(range(10, 10 + length)) for length in (23, 25, 90)]
    for size, windows in ((1, (None,)), (2, (None, 24))):
        config = dataclasses.replace(SIZES, num_blocks=100, max_num_batched_tokens=16, windows=windows)
        with ranked_runner(size, Load(folder, config, fused=False)) as (runner, _):
            engine = Engine(config, runner)
            said.append(run(engine, [ask(str(len(prompt)), prompt) for prompt in prompts]))
            engine.check_integrity()
    assert said[0] == said[1]


def test_copies_of_blocks_follow_rank_0_and_end_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs, what a transfer writes into another rank's pool is ordered with rank 0 alone."""
    load = Load(tiny_models.save(tiny_models.CONFIGS["llama"], tmp_path), SIZES, fused=False)
    done: list[str] = []
    with ranked_runner(2, load) as (runner, ranks):
        group = ranks[1].group
        for owner, name in ((group, "broadcast"), (ranks[1].pool, "copy"), (group, "all_reduce")):
            own = getattr(owner, name)
            monkeypatch.setattr(owner, name, lambda x, name=name, own=own: (done.append(name), own(x)))
        ranks[1].pool.tensor[1] = 7.0
        runner.copy_blocks([(1, 2)])
        assert done[:2] == ["broadcast", "copy"]
    assert done[2:] == ["all_reduce"]
    assert torch.equal(ranks[1].pool.tensor[2], ranks[1].pool.tensor[1])
