"""Mixtures as they are published in fp8, one expert after the other: read as they are, with transformers' answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoePreTrainedModel,
    MiniMaxM2Config,
    MixtralConfig,
    Qwen3MoeConfig,
)

from baton_kernels.experts.weights import BLOCK
from engine.model.errors import UnsupportedModel
from engine.model.experts import NAMES, expert_modules, own_forward, weights_of
from engine.model.load.checkpoint import Checkpoint
from engine.model.load.loader import load_model
from engine.model.parallel.group import ONE_RANK
from engine.model.quantization.expert_weights import keep_quantized
from engine.model.quantization.experts import Fp8Experts
from tests.engine import tiny_models
from tests.engine.test_expert_parallel import load_all
from tests.engine.test_parity import MAX_TOKENS, ask, make_engine, run
from tests.engine.test_sharded_quantization import WIDE
from tests.engine.test_sharding import check_same
from tools.quantize import write

torch.set_num_threads(1)

SIZES: dict[str, Any] = {**tiny_models.SHAPE, "hidden_size": 128}
CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128),
    "glm4_moe": Glm4MoeConfig(
        **{**SIZES, "intermediate_size": 256},
        num_local_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        n_shared_experts=1,
    ),
    "minimax_m2": MiniMaxM2Config(
        **{**SIZES, "intermediate_size": 128}, num_local_experts=4, num_experts_per_tok=2, rotary_dim=8
    ),
    "mixtral": MixtralConfig(**{**SIZES, "intermediate_size": 128}, num_local_experts=4, num_experts_per_tok=2),
}
FP8 = torch.float8_e4m3fn
FORMATS = ("fp8", "fbgemm-fp8", "fp8-block", "compressed-fp8", "compressed-fp8-tensor", "compressed-fp8-block")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("mixtures")
    return {name: tiny_models.save(config, folder / name) for name, config in CONFIGS.items()}


def quantized(source: Path, folder: Path, form: str) -> tuple[Path, Path]:
    """A checkpoint in that format, and a plain one with the values that it stands for."""
    write(source, folder / form, form)
    write(source, folder / "plain", form, dequantized=True)
    return folder / form, folder / "plain"


@pytest.mark.parametrize("form", FORMATS)
def test_experts_have_exactly_the_values_that_codes_stand_for(
    form: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    own, plain = quantized(sources["qwen3_moe"], tmp_path, form)
    stored = load_file(own / "model.safetensors")
    assert any(".experts.3.down_proj.weight_scale" in name for name in stored)
    assert {tensor.dtype for name, tensor in stored.items() if name.endswith("experts.3.down_proj.weight")} == {FP8}
    model, expected = (load_model(Checkpoint.open(path), load_format="safetensors") for path in (own, plain))
    modules = zip(expert_modules(model), expert_modules(expected), strict=True)
    for (_, module), (_, other) in modules:
        for name in NAMES:
            assert torch.equal(getattr(module, name), getattr(other, name))
        assert {name for name, _ in module.named_parameters()} == set(NAMES)


ANSWERING = [
    ("qwen3_moe", "fp8-block"),
    ("mixtral", "compressed-fp8"),
    ("minimax_m2", "fp8-block"),
    ("glm4_moe", "compressed-fp8"),
]


@pytest.mark.parametrize(("name", "form"), ANSWERING)
def test_greedy_answers_are_those_of_transformers(
    name: str, form: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    own, plain = quantized(sources[name], tmp_path, form)
    assert all(
        FP8 in {t.dtype for n, t in load_file(own / "model.safetensors").items() if e in n}
        for e in ("q_proj", ".experts.2.")
    )
    load_model(Checkpoint.open(own), load_format="safetensors")
    reference: Any = tiny_models.reference(plain)
    torch.manual_seed(0)
    prompts = [tuple(torch.randint(0, tiny_models.VOCAB_SIZE, (length,)).tolist()) for length in (1, 5, 30, 70)]
    engine, _ = make_engine(own, max_num_batched_tokens=32)
    said = run(engine, [ask(str(i), prompt) for i, prompt in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        done = reference.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MAX_TOKENS)
        assert said[str(i), 0] == done[0, len(prompt) :].tolist()


@pytest.mark.parametrize(("block", "by_rows"), [(BLOCK, False), (0, True), (0, False)])
def test_modules_that_keep_8_bits_compute_the_same(block: int, by_rows: bool, sources: dict[str, Path]) -> None:
    """As on a GPU."""
    torch.manual_seed(0)
    module: Any = expert_modules(load_model(Checkpoint.open(sources["qwen3_moe"]), load_format="safetensors"))[0][1]
    form = Fp8Experts("weight_scale", block, by_rows)
    form.create("experts", module)
    for name, parameter in module.named_parameters():
        is_scale = name.endswith("_scale")
        parameter.copy_(torch.rand(parameter.shape) + 0.5 if is_scale else torch.randn(parameter.shape) * 0.1)
    gate_up, down = (form.take(module, name) for name in NAMES)
    assert keep_quantized(module, gate_up, down, torch.float32) is None
    of = weights_of(module)
    assert of is not None
    assert of.eight_bits
    assert of.block == block
    assert not of.arranged
    x, ids, weights = torch.randn(5, 128), torch.arange(5)[:, None] % 4, torch.rand(5, 1)
    kept = module(x, ids, weights)
    whole: Any = expert_modules(load_model(Checkpoint.open(sources["qwen3_moe"]), load_format="safetensors"))[0][1]
    form.create("experts", whole)
    assert not torch.equal(kept, torch.zeros_like(kept))
    for name in NAMES:
        getattr(whole, name).copy_(getattr(module, name))
    whole.gate_up_proj_weight_scale.copy_(_as_stored(gate_up[1], block, by_rows, 2))
    whole.down_proj_weight_scale.copy_(_as_stored(down[1], block, by_rows, 1))
    form.process("experts", whole, torch.float32, ONE_RANK)
    assert getattr(whole, NAMES[0]).dtype == torch.float32
    torch.testing.assert_close(kept, own_forward(whole)(whole, x, ids, weights))


def _as_stored(scale: torch.Tensor, block: int, by_rows: bool, num_joined: int) -> torch.Tensor:
    if block:
        return scale
    return scale[:, :, None] if by_rows else scale.view(len(scale), num_joined, -1)[:, :, 0]


def test_random_weights(sources: dict[str, Path], tmp_path: Path) -> None:
    own, _ = quantized(sources["qwen3_moe"], tmp_path, "fp8-block")
    one, other = (load_model(Checkpoint.open(own), load_format="dummy") for _ in range(2))
    for (_, module), (_, same) in zip(expert_modules(one), expert_modules(other), strict=True):
        for name in NAMES:
            assert torch.equal(getattr(module, name), getattr(same, name))
            assert 0.01 < getattr(module, name).std() < 0.03


def test_what_cannot_be_run_is_refused_by_name(sources: dict[str, Path], tmp_path: Path) -> None:
    own, _ = quantized(sources["qwen3_moe"], tmp_path, "fp8-block")
    config = json.loads((own / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [64, 64]
    (own / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r"mlp.experts: experts in fp8 with blocks of 64: only those of 128"):
        load_model(Checkpoint.open(own))
    config["quantization_config"]["weight_block_size"] = [128, 128]
    config["moe_intermediate_size"] = 64
    (own / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UnsupportedModel, match=r"gate_up_proj: blocks of 128 do not divide its 64 rows and 128 columns"
    ):
        load_model(Checkpoint.open(own))


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Checkpoint:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return Checkpoint.open(folder)


def test_layers_that_predict_further_tokens_are_left_out(sources: dict[str, Path], tmp_path: Path) -> None:
    """GLM-4.5-Air's files have one more, the 46th, than its model."""
    own, _ = quantized(sources["glm4_moe"], tmp_path, "compressed-fp8")

    def add(tensors: dict[str, torch.Tensor]) -> None:
        last = {name: tensor for name, tensor in tensors.items() if ".layers.1." in name}
        tensors |= {name.replace(".layers.1.", ".layers.46."): tensor.clone() for name, tensor in last.items()}

    plain = load_model(Checkpoint.open(own), load_format="safetensors").state_dict()
    model = load_model(rewritten(own, add), load_format="safetensors")
    assert all(torch.equal(tensor, plain[name]) for name, tensor in model.state_dict().items())


def test_a_layer_is_not_left_out_that_this_model_has(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GLM-4.5, of whose class GLM-4.5-Air is, has a 46th layer."""
    own, _ = quantized(sources["glm4_moe"], tmp_path, "compressed-fp8")
    monkeypatch.setattr(Glm4MoePreTrainedModel, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.1\."])
    monkeypatch.setattr(
        Glm4MoeForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.1\."], raising=False
    )
    load_model(Checkpoint.open(own), load_format="safetensors")


def test_scales_may_have_dimensions_of_one(sources: dict[str, Path], tmp_path: Path) -> None:
    own, _ = quantized(sources["qwen3_moe"], tmp_path, "compressed-fp8")
    plain = load_model(Checkpoint.open(own), load_format="safetensors").state_dict()

    def flatten(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("weight_scale") and ".experts." in name]:
            tensors[name] = tensors[name].flatten()

    model = load_model(rewritten(own, flatten), load_format="safetensors")
    assert all(torch.equal(tensor, plain[name]) for name, tensor in model.state_dict().items())


def test_an_expert_in_16_bits_beside_others_in_8_is_noticed(sources: dict[str, Path], tmp_path: Path) -> None:
    own, _ = quantized(sources["qwen3_moe"], tmp_path, "fp8-block")

    def widen(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.1.mlp.experts.2.up_proj.weight"
        tensors[name] = tensors[name].bfloat16()

    with pytest.raises(UnsupportedModel, match=r"transformers converts .*experts.2.up_proj.weight"):
        load_model(rewritten(own, widen), load_format="safetensors")


def test_an_expert_without_its_scale_is_noticed(sources: dict[str, Path], tmp_path: Path) -> None:
    own, _ = quantized(sources["qwen3_moe"], tmp_path, "fp8-block")

    def remove(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.mlp.experts.2.up_proj.weight_scale_inv"]

    checkpoint = rewritten(own, remove)
    with pytest.raises(UnsupportedModel, match=r"has not all experts of .*gate_up_proj_weight_scale_inv"):
        load_model(checkpoint, load_format="safetensors")


def test_whole_experts_are_divided_among_ranks(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(**WIDE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128)
    own, _ = quantized(tiny_models.save(config, tmp_path / "source"), tmp_path, "fp8-block")
    check_same(own, 2, fused=True, whole_experts=True)
    whole = load_model(Checkpoint.open(own), load_format="safetensors")
    for rank, model in load_all(own, 2, whole_experts=True).items():
        for (_, module), (_, all_experts) in zip(expert_modules(model), expert_modules(whole), strict=True):
            for name in NAMES:
                assert torch.equal(getattr(module, name), getattr(all_experts, name)[2 * rank : 2 * rank + 2])


@pytest.mark.parametrize("form", FORMATS)
def test_a_part_of_each_expert_on_each_rank(form: str, tmp_path: Path) -> None:
    """Rows of gate and up, columns of down, and of the scales those that theirs have. Of three blocks the first rank
    has one."""
    config = Qwen3MoeConfig(**WIDE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=384)
    own, _ = quantized(tiny_models.save(config, tmp_path / "source"), tmp_path, form)
    check_same(own, 2, fused=True)
    whole = expert_modules(load_model(Checkpoint.open(own), load_format="safetensors"))
    for rank, model in load_all(own, 2).items():
        for (_, module), (_, all_of_each) in zip(expert_modules(model), whole, strict=True):
            (own_gate_up, own_down), (gate_up, down) = (
                [getattr(each, name) for name in NAMES] for each in (module, all_of_each)
            )
            middle = 128 if "block" in form else 192
            part = slice(middle, None) if rank else slice(middle)
            assert torch.equal(own_gate_up, torch.cat([half[:, part] for half in gate_up.chunk(2, 1)], 1))
            assert torch.equal(own_down, down[:, :, part])


def test_parts_that_cut_blocks_are_refused(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(**WIDE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128)
    own, _ = quantized(tiny_models.save(config, tmp_path / "source"), tmp_path, "fp8-block")
    with pytest.raises(UnsupportedModel, match=r"128 features of each expert .* in blocks of 128 cannot be divided"):
        load_all(own, 2)
