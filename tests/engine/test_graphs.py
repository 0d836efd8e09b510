"""CUDA graphs of steps: which sizes there are, and that a replay computes what the same step does op by op."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.messages import AttemptId
from baton.sampling import SamplingParams
from engine.config import EngineConfig
from engine.model import fast
from engine.model.batch import DeviceState, ModelInputs
from engine.model.graphs import (
    NO_GRAPH,
    StepGraphs,
    StepNeeds,
    decode_capture_sizes,
    single_prompt_sizes,
    step_padding,
)
from engine.model.layer_marks import LayerMarks
from engine.model.load import loader
from engine.model.load.checkpoint import Checkpoint
from engine.model.probe import probe
from engine.model.rank import RankModel, Score
from engine.model.rank_step import RankStep
from engine.model.runner import TorchModelRunner, TorchStep
from engine.sequence import Sequence
from engine.step import Chunk
from engine.step_padding import StepPadding
from tests.engine import tiny_models

SIZES = EngineConfig(num_blocks=400, max_model_len=600, vocab_size=tiny_models.VOCAB_SIZE, max_num_seqs=24)
MIXTURES = [("gpt_oss", "float32"), ("qwen3_moe", "float32"), ("glm4_moe", "float32")]
NUM_GROUPS = 2
"""Of layers: graphs of prompts are cut between them."""


@pytest.mark.parametrize("most", [1, 3, 8, 256, 300, 5000])
def test_the_ladder_reaches_the_largest_batch_and_wastes_little(most: int) -> None:
    sizes = decode_capture_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == min(most, 1024)
    for low, high in itertools.pairwise(sizes):
        assert high - low <= max(8, low // 2), "a batch would be padded by more than half"


@pytest.mark.parametrize(
    ("budget", "most", "sizes"),
    [
        (2048, 1024, [96, 352, 480, 608, 736, 864, 1024]),
        (300, 1024, [96, 300]),
        (64, 1024, [64]),
        (2048, 0, []),
    ],
)
def test_prompts_beside_decodes_have_a_graph_of_the_budgets_size(budget: int, most: int, sizes: list[int]) -> None:
    assert ladders(budget, 0, most) == ({32: tuple(sizes)} if sizes else {})


def ladders(budget: int, most_alone: int, most_mixed: int, **config: Any) -> dict[int, tuple[int, ...]]:
    sizes = dataclasses.replace(SIZES, max_num_batched_tokens=budget, **config)
    return dict(step_padding(sizes, most_alone, most_mixed).ladders)


def test_prompts_beside_decodes_fill_tiles_of_matmuls() -> None:
    assert all((size + 32) % 128 == 0 for size in ladders(8192, 0, 1000)[32])


def test_prompts_have_graphs_beside_many_decodes_too() -> None:
    """Op by op, a step of 736 tokens beside 33 decodes takes twice as long."""
    many = ladders(736, 0, 1024, max_num_seqs=256)
    assert [*many] == [32, 64, 128]
    assert all(sizes[-1] == 736 for sizes in many.values())
    assert all((size + places) % 128 == 0 for places, sizes in many.items() for size in sizes[:-1])


def test_with_a_target_more_steps_have_a_graph() -> None:
    fine = ladders(2048, 0, 1024, target_itl_s=0.01, max_num_seqs=256)
    assert set(ladders(2048, 0, 1024)[32]) < set(fine[32])
    assert all((places + size) % 32 == 0 for places, sizes in fine.items() for size in sizes)
    assert [*fine] == [32, 64, 128]
    assert [*ladders(2048, 0, 1024, target_itl_s=0.01, max_num_seqs=33)] == [32, 64]


def test_prompts_have_graphs_within_the_budget() -> None:
    assert ladders(100, 512, 0)[0] == (32, 64)
    assert ladders(8192, 512, 0)[0][-1] == 512
    assert single_prompt_sizes(8192, 2048) == [2048]
    assert single_prompt_sizes(2048, 512) == single_prompt_sizes(736, 2048) == []


def test_what_a_step_needs() -> None:
    a, b, c = sequences([40, 30, 20])
    decodes = [Chunk.of(a, 39, 1), Chunk.of(b, 29, 1)]
    drafted = dataclasses.replace(Chunk.of(c, 17, 3), num_logits=3)
    prompt, single = Chunk.of(c, 0, 12), Chunk.of(c, 0, 1)
    assert StepNeeds.of(decodes) == StepNeeds(1, 2, 2, 0, 0, 0, has_prompts=0)
    assert StepNeeds.of([*decodes, drafted]) == StepNeeds(3, 3, 2, 1, 3, 20, has_prompts=0)
    assert StepNeeds.of([*decodes, prompt]) == StepNeeds(12, 3, 2, 1, 12, 12, has_prompts=1)
    assert StepNeeds.of([*decodes, single]) == NO_GRAPH, "its place among the decodes would have logits"
    assert not any(StepNeeds.of([])[1:])


@pytest.mark.usefixtures("graphs_of_a_cpu")
def test_a_graph_has_room_for_what_each_data_parallel_node_has() -> None:
    tables = torch.zeros(1, SIZES.max_num_seqs, 40, dtype=torch.int32)
    state = DeviceState(tables, torch.zeros(SIZES.max_num_seqs, dtype=torch.int32), SIZES.block_size, ())
    padding = StepPadding(((0, (32, 64)), (4, (32, 128))), most_prompts=2, most_context=300)
    found = StepGraphs(lambda inputs, marks: torch.zeros(1), state, [1, 4], padding, (64,), decode_query_lens=[1, 3])
    a, b, c = sequences([40, 200, 400])
    decode, drafted = Chunk.of(a, 39, 1), dataclasses.replace(Chunk.of(b, 197, 3), num_logits=3)

    def room(*nodes: list[Chunk]) -> int:
        """Tokens of the graph; 0: there is none."""
        needs = StepNeeds(*map(max, zip(*map(StepNeeds.of, nodes), strict=True)))
        graph = found.with_room(needs)
        return 0 if graph is None else graph.num_tokens

    assert room([decode], []) == 1
    assert room([decode], [drafted]) == 3
    assert room([decode] * 3, [drafted]) == 4 * 3
    assert room([Chunk.of(b, 0, 40)], []) == 64
    assert room([Chunk.of(b, 0, 20)], [decode] * 2) == 4 + 32
    assert room([Chunk.of(b, 0, 40)], [decode, Chunk.of(b, 0, 50)]) == 4 + 128
    assert room([Chunk.of(b, 0, 20)], [drafted, Chunk.of(a, 0, 14)]) == 32
    assert room([Chunk.of(b, 0, 20)], [decode] * 5) == 0
    assert room([Chunk.of(b, 0, 20)], [Chunk.of(b, 0, 5)] * 3) == 0
    assert room([decode], [Chunk.of(c, 290, 20)]) == 0
    alone = [Chunk.of(b, 0, 40)]
    assert found.fitting(alone) is found._squares[64]
    assert found.with_room(StepNeeds.of(alone)) is found._prompts[0, 64], "others may have tokens, too"
    assert found.fitting([Chunk.of(b, 1, 40)]) is found._prompts[0, 64]


@pytest.mark.usefixtures("graphs_of_a_cpu")
def test_a_replayed_step_follows_rank_0_before_it_reads_the_last_tokens() -> None:
    """Before that, the other ranks do not have them."""
    tables = torch.zeros(1, SIZES.max_num_seqs, 40, dtype=torch.int32)
    state = DeviceState(tables, torch.zeros(SIZES.max_num_seqs, dtype=torch.int32), SIZES.block_size, ())

    def begin() -> None:
        state.last_tokens.fill_(7)

    def forward(inputs: ModelInputs, marks: Any) -> Tensor:
        return inputs.input_ids.clone()

    found = StepGraphs(forward, state, [4], StepPadding(((0, (32,)),), 2, 300), (64,), begin=begin)
    chunk, graph = Chunk.of(sequences([39])[0], 39, 1), found.with_room(StepNeeds(1, 1, 1, 0, 0, 0, has_prompts=0))
    assert graph is not None
    for _ in range(2):
        state.last_tokens.zero_()
        assert found.run(graph.index, graph.pack([chunk], [0]))[0].item() == 7


@pytest.mark.usefixtures("graphs_of_a_cpu")
def test_each_step_of_a_rank_follows_rank_0_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a part of its graph, if it has one."""
    model = loader.load_model(Checkpoint.open(tiny_models.save(tiny_models.CONFIGS["llama"], tmp_path)), "float32")
    runner = TorchModelRunner(model, SIZES, probe(model, SIZES.max_model_len))
    done = list[str]()
    forward = RankModel._forward
    monkeypatch.setattr(RankModel, "_follow_rank_0", lambda rank: done.append("follow"))
    monkeypatch.setattr(RankModel, "_forward", lambda *args: done.append("forward") or forward(*args))
    for captured in (False, True):
        if captured:
            runner.capture([1], 0)
        (seq,) = sequences([40])
        done.clear()
        for chunk in (Chunk.of(seq, 0, 39), Chunk.of(seq, 39, 1)):
            runner.launch([chunk]).wait()
        assert done == ["follow", "forward"] * 2
        runner.forget(seq)


class LogitsOf(TorchModelRunner):
    """Keeps the logits of its last step."""

    def _compute(self, step: RankStep, marks: LayerMarks | None = None, score: Score | None = None) -> Tensor:
        self.last = super()._compute(step, marks, score).clone()
        return self.last


def sequences(lengths: list[int]) -> list[Sequence]:
    blocks = iter(range(1, SIZES.num_blocks))
    made = []
    for number, length in enumerate(lengths):
        tokens = tuple((7 * number + i) % tiny_models.VOCAB_SIZE for i in range(length))
        seq = Sequence(AttemptId(1, str(number), 0), [0], tokens, SamplingParams(temperature=0.0), hand_off=True)
        seq.block_table = [next(blocks) for _ in range(-(-length // SIZES.block_size))]
        made.append(seq)
    return made


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("most_alone", "target_itl_s"),
    [(512, None), (64, None), (64, 0.01)],
    ids=["prompts-alone", "prompts-as-if-mixed", "fine"],
)
@pytest.mark.parametrize(
    ("family", "dtype"),
    # in 16 bits, rounding would send some tokens to other experts
    [*itertools.product(["llama", "qwen3", "gemma2"], ["float32", "bfloat16"]), *MIXTURES],
)
def test_a_replayed_step_equals_the_step_op_by_op(
    family: str, dtype: str, most_alone: int, target_itl_s: float | None, tmp_path: Path
) -> None:
    config_of = {**tiny_models.CONFIGS, **tiny_models.MIXTURES}
    model = loader.load_model(Checkpoint.open(tiny_models.save(config_of[family], tmp_path)), dtype, "cuda")
    probed = probe(model, SIZES.max_model_len)
    report = fast.apply(model, probed, SIZES.max_model_len)
    assert report.taken_back is None
    assert bool(report.pieces["experts"].fused) == ((family, dtype) in MIXTURES)
    steps = []
    config = dataclasses.replace(SIZES, target_itl_s=target_itl_s)  # which makes a difference only to the padding
    config = dataclasses.replace(config, padding=step_padding(config, most_alone, 512))
    for captured in (True, False):
        runner = LogitsOf(model, config, probed, wake=lambda: None, layer_groups=NUM_GROUPS)
        if captured:
            runner.capture([1, 4, 24], most_alone)
        logits = []
        for lengths in ([1], [33], [70, 5, 300], [17] * 3, [40] * 24):
            seqs = sequences(lengths)
            # a graph of prompts where they fit one, then one of decodes, padded unless there is one of that size
            prompts = [Chunk.of(seq, 0, seq.num_tokens) for seq in seqs]
            decodes = [Chunk.of(seq, seq.num_tokens - 1, 1) for seq in seqs]
            mixed = [*decodes[: len(seqs) // 2], *prompts[len(seqs) // 2 :]]
            for chunks in (prompts, decodes, mixed):
                step = runner.launch(chunks)
                step.wait()
                logits.append(runner.last)
                if chunks is prompts and seqs[0].num_tokens > 1:
                    assert isinstance(step, TorchStep)
                    assert step.marks is not None
                    assert len(step.marks.events) == NUM_GROUPS, "a graph hides when its layers are computed"
            for seq in seqs:
                runner.forget(seq)
        steps.append(logits)
    for replayed, launched in zip(*steps, strict=True):
        assert replayed.shape == launched.shape
        assert len(replayed)
        assert replayed.isfinite().all()
        # Attention shares its sums out differently when lengths are not known, as in a graph.
        error = (replayed - launched).float().norm() / launched.float().norm()
        assert error < (1e-4 if dtype == "float32" else 0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_prompt_alone_equals_itself_op_by_op(family: str, dtype: str, tmp_path: Path) -> None:
    sizes = dataclasses.replace(SIZES, max_model_len=2100, max_num_batched_tokens=2048)
    sizes = dataclasses.replace(sizes, padding=step_padding(sizes, 2048, 0))
    model = loader.load_model(Checkpoint.open(tiny_models.save(tiny_models.CONFIGS[family], tmp_path)), dtype, "cuda")
    probed = probe(model, sizes.max_model_len)
    fast.apply(model, probed, sizes.max_model_len)
    steps = []
    for captured in (True, False):
        runner = LogitsOf(model, sizes, probed)
        if captured:
            runner.capture([1], 2048)
        logits = []
        for length, start in ((2048, 0), (1900, 0), (2048, 64)):  # as long as the graph, padded, after a cached prefix
            (seq,) = sequences([length])
            for chunk in (Chunk.of(seq, 0, start), Chunk.of(seq, start, length - start)):
                if chunk.length:
                    runner.launch([chunk]).wait()
            logits.append(runner.last)
            runner.forget(seq)
        steps.append(logits)
    for replayed, launched in zip(*steps, strict=True):
        error = (replayed - launched).float().norm() / launched.float().norm()
        assert error < (1e-4 if dtype == "float32" else 0.1)


@pytest.mark.gpu
def test_a_capture_that_fails_leaves_the_gpu_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_models.CONFIGS["llama"]
    model = loader.load_model(Checkpoint.open(tiny_models.save(config, tmp_path)), "float32", "cuda")
    runner = TorchModelRunner(model, SIZES, probe(model, SIZES.max_model_len))
    forward = RankModel._forward

    def fails_in_a_capture(*args: Any) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("cannot be captured")
        return forward(*args)

    with monkeypatch.context() as broken:
        broken.setattr(RankModel, "_forward", fails_in_a_capture)
        with pytest.raises(ValueError, match="cannot be captured"):
            runner.capture([1], 64)
    assert gc.isenabled()
    assert torch.ones(3, device="cuda").sum().item() == 3
    runner.capture([1], 64)
