"""A model divided among pipeline stages: logits and KV are those of one rank, and stages compute different steps at a
time."""

from __future__ import annotations

import dataclasses
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    CohereConfig,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    NemotronConfig,
    PhiConfig,
    PhimoeConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from baton.layout import LayerKv
from engine.checkpoint import EMBEDDED
from engine.engine import Engine
from engine.model.errors import UnsupportedModel
from engine.model.load import loader
from engine.model.load.checkpoint import Checkpoint
from engine.model.load.skeleton import build_skeleton
from engine.model.parallel.group import RankGroup
from engine.model.parallel.part import RankPart
from engine.model.parallel.pipeline import Pipeline
from engine.model.parallel.sharding import kv_slice
from engine.model.parallel.stages import Stage, keep_stage
from engine.model.probe import probe
from engine.sequence import SequenceState
from tests.engine import tiny_models
from tests.engine.rank_threads import Load, in_threads, ranked_runner
from tests.engine.test_model_families import SIZES
from tests.engine.test_parity import ask
from tests.engine.test_sharding import logits_and_kv, own_part, parameters, request, story
from tools.quantize import write

torch.set_num_threads(1)

SHAPE = {**tiny_models.SHAPE, "num_hidden_layers": 5}
CONFIGS: dict[str, Any] = {
    **{
        name: type(config)(**{**config.to_dict(), "num_hidden_layers": 5, "layer_types": None})
        for name, config in tiny_models.CONFIGS.items()
    },
    "cohere": CohereConfig(**SHAPE, logit_scale=0.5, tie_word_embeddings=True),
    "granite": GraniteConfig(**SHAPE, embedding_multiplier=3.0, logits_scaling=2.0),
    "gpt_neox": GPTNeoXConfig(**{name: size for name, size in SHAPE.items() if name != "num_key_value_heads"}),
    "nemotron": NemotronConfig(**{**SHAPE, "head_dim": 8}),
    "phi": PhiConfig(**SHAPE),
    "phimoe": PhimoeConfig(**SHAPE, num_local_experts=4),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32),
    **{
        name: type(config)(**{**config.to_dict(), "num_hidden_layers": 5})
        for name, config in tiny_models.MIXTURES.items()
        if name in ("olmoe", "granite_moe")
    },
}
"""What is special: other names of parts (Phi; GPT-NeoX, whose files have another one for the head), factors before the
first layer or after the last (Gemma 2, Granite, Cohere), windows and kinds of layers by number (Qwen2, Gemma 2,
gpt-oss), experts (gpt-oss, and Qwen3-MoE, which has a tensor for each), a plan of our own (OLMoE, Granite-MoE,
Nemotron, Phi-3.5-MoE)."""
CI = {("llama", 2, 2), ("gemma2", 3, 1), ("qwen2", 2, 1), ("gpt_oss", 2, 1), ("granite", 2, 1), ("qwen3_moe", 2, 2)}
CI |= {("olmoe", 2, 1), ("gpt_neox", 2, 1)}
CASES = [
    pytest.param(family, stages, tp, marks=[] if (family, stages, tp) in CI else pytest.mark.full)
    for family in CONFIGS
    for stages in (2, 3)
    for tp in ((1, 2) if family in ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt_oss", "qwen3_moe") else (1,))
]


@given(st.integers(1, 200), st.integers(1, 16))
def test_stages_have_runs_of_layers_that_differ_by_one_at_most(num_layers: int, size: int) -> None:
    size = min(size, num_layers)
    runs = [Stage(number, size).layers(num_layers) for number in range(size)]
    assert [layer for run in runs for layer in run] == list(range(num_layers))
    assert {len(run) for run in runs} <= {num_layers // size, num_layers // size + 1}
    assert len(runs[-1]) == num_layers // size


@pytest.mark.parametrize(
    ("num_layers", "size", "expected"), [(5, 2, [3, 2]), (5, 3, [2, 2, 1]), (6, 4, [1, 2, 2, 1]), (7, 3, [2, 3, 2])]
)
def test_left_over_layers_are_in_front_of_the_last_stage(num_layers: int, size: int, expected: list[int]) -> None:
    """As in vLLM."""
    assert [len(Stage(number, size).layers(num_layers)) for number in range(size)] == expected


@pytest.mark.parametrize(("family", "stages", "tp"), CASES)
def test_logits_and_kv_are_those_of_one_rank(family: str, stages: int, tp: int, tmp_path: Path) -> None:
    folder = tiny_models.save(CONFIGS[family], tmp_path)
    alone, divided = Load(folder, SIZES, fused=True), Load(folder, SIZES, fused=True, num_stages=stages)
    one, (whole,) = logits_and_kv(1, alone)
    several, pools = logits_and_kv(stages * tp, divided)
    assert several.shape == one.shape
    assert float(((several - one).norm(dim=-1) / one.norm(dim=-1)).max()) < 1e-5
    config = Checkpoint.open(folder).config
    for rank, pool in enumerate(pools):
        held = kv_slice(config, rank % tp, tp, Stage(rank // tp, stages))
        mine = whole[:, held.layer_start : held.layer_end, :, held.head_start : held.head_end]
        torch.testing.assert_close(pool, mine, atol=1e-4, rtol=1e-4, equal_nan=True)
    check_as_fused(alone, divided, tp)


def check_as_fused(alone: Load, divided: Load, tp: int) -> None:
    """Whatever is fast in one rank is so in stages: all norms, projections and additions to the residual together."""
    (whole,) = alone.reports
    assert whole.taken_back is None
    assert all(report.taken_back is None for report in divided.reports)
    sums = [report.pieces["sum_norm"] for report in divided.reports]
    assert all(bool(tally.fused) == (tp > 1) for tally in sums)
    assert {why for tally in sums for _, why in tally.refused} <= {"no norm follows in this stage"}
    assert tp == 1 or not any(report.pieces["expert_sum"].found for report in divided.reports)
    # Each stage has its own table; what experts of one rank leave to norms, ranks sum.
    for name in whole.pieces.keys() - {"rotary_table", "sum_norm", *(["expert_sum"] if tp > 1 else [])}:
        assert sum(report.pieces[name].fused for report in divided.reports) == tp * whole.pieces[name].fused, name


@pytest.mark.parametrize("ties", [True, False])
def test_a_stage_has_its_layers_alone(ties: bool, tmp_path: Path) -> None:
    """Each rank has its part of them; the first stage has the embedding, the last the norm and the head: its own copy
    of tied ones."""
    config = type(CONFIGS["llama"])(**{**SHAPE, "tie_word_embeddings": ties})
    folder = tiny_models.save(config, tmp_path)
    whole = parameters(loader.load_model(Checkpoint.open(folder)))
    for rank, model in enumerate(stages_of(folder, 2, 2)):
        stage, tp_rank = Stage(rank // 2, 2), rank % 2
        own = parameters(model)
        assert own.keys() == names_of(stage, whole, ties)
        for name, part in own.items():
            stored = "model.embed_tokens.weight" if ties and name == "lm_head.weight" else name
            assert torch.equal(part, own_part(name, whole[stored], tp_rank, 2, head_dim=16)), f"{name} of rank {rank}"


def names_of(stage: Stage, whole: dict[str, torch.Tensor], ties: bool) -> set[str]:
    """Written down once more, for five layers in two stages."""
    layers = {"0", "1", "2"} if stage.is_first else {"3", "4"}
    ends = {"model.embed_tokens.weight"} if stage.is_first else {"model.norm.weight", "lm_head.weight"}
    return {name for name in whole if name.startswith("model.layers.") and name.split(".")[2] in layers} | ends


def stages_of(folder: Path, num_stages: int, tp: int) -> list[PreTrainedModel]:
    """The models of all ranks."""
    models: dict[int, PreTrainedModel] = {}
    load = Load(folder, SIZES, fused=False, num_stages=num_stages)

    def run(group: RankGroup) -> None:
        models[group.rank], _ = load(Pipeline(group, num_stages))

    with in_threads(num_stages * tp, run) as group:
        run(group)
    return [models[rank] for rank in range(num_stages * tp)]


@pytest.mark.parametrize("form", ["fp8-block", pytest.param("gptq", marks=pytest.mark.full)])
def test_weights_in_any_quantized_form_are_divided_by_layers(form: str, tmp_path: Path) -> None:
    """Also in those of which a rank cannot have a part of a layer."""
    write(EMBEDDED["baton-tiny"], tmp_path / "q", form)
    whole = parameters(loader.load_model(Checkpoint.open(tmp_path / "q")))
    for model in stages_of(tmp_path / "q", 2, 1):
        for name, own in parameters(model).items():
            stored = "model.embed_tokens.weight" if name == "lm_head.weight" and name not in whole else name
            assert torch.equal(own, whole[stored]), name


@pytest.mark.parametrize(("stages", "ahead"), [(2, True), (2, False), (4, True)])
def test_an_engine_says_the_same_over_stages(stages: int, ahead: bool, tmp_path: Path) -> None:
    """With prefix hits, forks, prompt logprobs, preemptions, and a request that leaves while it is in some stage; also
    decodes, whose next token the host does not know when their next step could be launched."""
    folder = tiny_models.save(CONFIGS["qwen3"], tmp_path)
    config = dataclasses.replace(
        SIZES, num_blocks=26, max_num_batched_tokens=32, max_model_len=64, block_size=4, async_scheduling=ahead
    )
    with ranked_runner(1, Load(folder, config, fused=True)) as (runner, _):
        alone, scored_alone, _ = story(Engine(config, runner))
    config = dataclasses.replace(config, num_stages=stages)
    with ranked_runner(stages, Load(folder, config, fused=True, num_stages=stages)) as (runner, _):
        tokens, scored, _ = story(Engine(config, runner))
    alone.pop(("leaves", 0), None)  # how many tokens it had by then is another matter
    tokens.pop(("leaves", 0), None)
    assert tokens == alone
    assert sorted(scored) == sorted(scored_alone)


def test_dummy_weights_are_those_of_the_stage_alone() -> None:
    model = loader.load_model(
        Checkpoint.open(EMBEDDED["baton-tiny"]), load_format="dummy", part=RankPart(stage=Stage(1, 2))
    )
    assert {name.split(".")[2] for name in parameters(model) if ".layers." in name} == {"3", "4"}
    assert len(probe(model).kv) == 2


# ---- at the same time ----


@pytest.mark.parametrize("stages", [2, 3])
def test_rank_0_computes_as_many_steps_as_there_are_stages(stages: int, tmp_path: Path) -> None:
    """The other stages are kept from a prompt's first step until the first stage has computed all of them. The next
    step is due at once, though the engine knows that the one before takes 10 s."""
    folder = tiny_models.save(CONFIGS["llama"], tmp_path)
    size = -(-25 // stages)
    config = dataclasses.replace(SIZES, max_num_batched_tokens=size, async_scheduling=True, num_stages=stages)
    may_go_on, woken, now = threading.Event(), threading.Semaphore(0), [0.0]
    may_go_on.set()
    load = Load(folder, config, fused=True, num_stages=stages)
    with ranked_runner(stages, load, before=lambda rank: may_go_on.wait(60), wake=woken.release) as (runner, _):
        engine = Engine(config, runner, clock=lambda: now[0])
        engine.add(request("before", 0))
        while engine.has_work:
            engine.compute(engine.schedule(now[0]), wait=False)
            assert woken.acquire(timeout=60)
            now[0] += 10
            engine.retire()
        may_go_on.clear()
        try:
            engine.add(request("long", 1))
            for launched in range(stages):
                assert engine.has_room
                assert engine.launch_at is None
                assert not engine.compute(engine.schedule(now[0]), wait=False).advanced
                assert len(engine._in_flight) == launched + 1
            assert [step.chunks[0].start for step in engine._in_flight] == list(range(0, 25, size))
            assert not any(step.step.is_done() for step in engine._in_flight)
            ends = engine._in_flight[-1].chunks[0].sequence
            assert engine.layers_computed() == {ends: runner.pool.tensor.shape[1]}
            assert not engine.has_room
            assert not woken.acquire(blocking=False)
        finally:
            may_go_on.set()
        assert woken.acquire(timeout=60)
        assert engine.compute(engine.schedule(now[0])).num_tokens == size
        assert len(answer(engine, "long")) == 12
        engine.check_integrity()


def test_kv_of_the_first_stage_is_there_while_the_second_computes(tmp_path: Path) -> None:
    """Whoever sends it is woken at the launch of the step that ends the prompt, and not of those before."""
    folder = tiny_models.save(CONFIGS["llama"], tmp_path)
    config = dataclasses.replace(SIZES, max_num_batched_tokens=16, async_scheduling=True, num_stages=2)
    may_go_on, woken = threading.Event(), threading.Semaphore(0)
    load = Load(folder, config, fused=True, num_stages=2)
    with ranked_runner(2, load, before=lambda rank: may_go_on.wait(60), wake=woken.release) as (runner, ranks):
        engine = Engine(config, runner)
        assert not engine.only_launches
        sent = ask("sent", tuple(range(1, 26)), hand_off=True, max_tokens=4)
        try:
            engine.add(sent)
            engine.compute(engine.schedule(0.0), wait=False)
            assert (engine.layers_computed(), woken.acquire(blocking=False)) == ({}, False)
            engine.compute(engine.schedule(0.0), wait=False)
            assert woken.acquire(blocking=False)
            own, later = (rank.pool.tensor.shape[1] for rank in ranks)
            assert engine.layers_computed() == {sent: own}
            assert own + later == runner.model.config.num_hidden_layers
            early = runner.pool.tensor[list(sent.block_table)].clone()
        finally:
            may_go_on.set()
        while sent.state is not SequenceState.PARKED:
            engine.compute(engine.schedule(0.0))
        assert torch.equal(runner.pool.tensor[list(sent.block_table)], early)


def test_a_row_is_not_given_anew_while_a_step_in_a_stage_has_it(tmp_path: Path) -> None:
    """A request that leaves is sampled all the same: not into the penalties of the one that gets its row."""
    folder = tiny_models.save(CONFIGS["llama"], tmp_path)
    config = dataclasses.replace(SIZES, async_scheduling=True, num_stages=2)
    said = []
    for leaves in (False, True):
        with ranked_runner(2, Load(folder, config, fused=True, num_stages=2)) as (runner, _):
            engine = Engine(config, runner)
            late = request("late", 1)
            late.sampling = dataclasses.replace(late.sampling, presence_penalty=2.0, max_tokens=30)
            late.runs_ahead = False
            if leaves:
                early = request("early", 1)
                early.sampling = late.sampling
                engine.add(early)
                engine.compute(engine.schedule(0.0), wait=False)
                engine.sequences.release(early)
            engine.add(late)
            said.append(answer(engine, late.attempt_id.request_id))
            engine.check_integrity()
    assert said[0] == said[1]


def answer(engine: Engine, request_id: str) -> list[int]:
    tokens = []
    while engine.has_work or engine.device_busy_since is not None:
        result = engine.compute(engine.schedule(0.0))
        tokens += [token.token for token in result.sampled if token.sequence.attempt_id.request_id == request_id]
    return tokens


# ---- what cannot be divided ----


def test_more_stages_than_layers_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="llama: 5 layers cannot be divided among 6 pipeline stages"):
        keep_stage(build_skeleton(CONFIGS["llama"], torch.float32, "eager"), Stage(0, 6))


def test_a_model_without_a_plan_is_refused_by_name() -> None:
    config = GPT2Config(vocab_size=160, n_embd=64, n_layer=4, n_head=4, n_positions=64)
    with pytest.raises(UnsupportedModel, match="GPT2LMHeadModel has no pipeline-parallel plan"):
        keep_stage(build_skeleton(config, torch.float32, "eager"), Stage(0, 2))


@pytest.mark.parametrize("plan", [["layers", "norm"], ["embed_tokens", "norm", "layers"], ["norm", "layers", "norm"]])
def test_a_plan_in_another_form_is_refused(plan: list[str]) -> None:
    model = build_skeleton(CONFIGS["llama"], torch.float32, "eager")
    model.config.base_model_pp_plan = dict.fromkeys(plan, ([], []))
    with pytest.raises(UnsupportedModel, match=re.escape("of an embedding, decoder layers and a norm")):
        keep_stage(model, Stage(0, 2))


@pytest.mark.parametrize(("width", "shared"), [(16, 0), (0, 1)])
def test_a_stage_that_needs_more_than_hidden_states_is_refused(width: int, shared: int, tmp_path: Path) -> None:
    """Gemma 4, whose layers may get something of the embedding each, or the KV of an earlier layer."""
    config = Gemma4TextConfig(
        **{**SHAPE, "num_hidden_layers": 2},
        hidden_size_per_layer_input=width,
        vocab_size_per_layer_input=160,
        num_kv_shared_layers=shared,
        layer_types=["full_attention"] * 2,
        global_head_dim=16,
        num_global_key_value_heads=2,
    )
    checkpoint = Checkpoint.open(tiny_models.save(config, tmp_path))
    first, second = (loader.load_model(checkpoint, part=RankPart(stage=Stage(number, 2))) for number in range(2))
    probe(first)
    with pytest.raises(UnsupportedModel, match="Gemma4ForCausalLM: its later pipeline stages need more than hidden"):
        probe(second)


def test_a_stage_whose_layers_take_the_kv_of_an_earlier_stage_is_refused_by_name(tmp_path: Path) -> None:
    """Gemma 3n."""
    config = Gemma3nTextConfig(
        **{**SHAPE, "num_hidden_layers": 4},
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=160,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.0] * 4,
        laurel_rank=8,
    )
    checkpoint = Checkpoint.open(tiny_models.save(config, tmp_path))
    with pytest.raises(UnsupportedModel, match="Gemma3nForCausalLM does not run on a flattened batch"):
        probe(loader.load_model(checkpoint, part=RankPart(stage=Stage(1, 2))))


@pytest.mark.parametrize(("windows", "dims", "fits"), [((4, None), (8, 8), True), ((4, None), (8, 16), False)])
def test_what_all_stages_keep(windows: tuple[int | None, ...], dims: tuple[int, ...], fits: bool) -> None:
    """Also where stages have different numbers of layers, and two ranks each."""
    stages = [
        tuple(LayerKv(2, dim, dim, "float32", window) for _ in range(2 - n))
        for n, (dim, window) in enumerate(zip(dims, windows, strict=True))
    ]
    found: list[tuple[LayerKv, ...] | str] = []

    def run(group: RankGroup) -> None:
        pipeline = Pipeline(group, 2)
        try:
            found.append(pipeline.kv_of_all(stages[pipeline.stage.number]))
        except UnsupportedModel as error:
            found.append(str(error))

    with in_threads(4, run) as group:
        run(group)
    assert found == [stages[0] + stages[1] if fits else "the KV of different pipeline stages differs in shape"] * 4
