"""Mixtures as they are published in 4 and 8 bits, in words of several codes: the values that these stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig, Qwen3MoeConfig, Qwen3VLMoeConfig

from engine.model.errors import UnsupportedModel
from engine.model.experts import NAMES, expert_modules, weights_of
from engine.model.load.checkpoint import Checkpoint
from engine.model.load.loader import load_model
from engine.model.quantization import packed_experts
from tests.engine import tiny_models
from tests.engine.quantized_files import check_loads_alike, restate
from tests.engine.test_expert_parallel import load_all
from tests.engine.test_fp8_experts import quantized
from tests.engine.test_sharded_quantization import WIDE
from tests.engine.test_sharding import check_same

torch.set_num_threads(1)

CONFIGS: dict[str, Any] = {
    "qwen3_moe": Qwen3MoeConfig(**WIDE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=256),
    "mixtral": MixtralConfig(**{**WIDE, "intermediate_size": 256}, num_local_experts=4, num_experts_per_tok=2),
}
IN_ORDER = ["awq", "gptq", "gptq-asym", "compressed-w4a16", "compressed-w4a16-asym", "compressed-w4a16-channel"]
FORMATS = [*IN_ORDER, "gptq-desc-act", "gptq-8bit", "compressed-int8"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("mixtures")
    return {name: tiny_models.save(config, folder / name) for name, config in CONFIGS.items()}


@pytest.mark.parametrize(
    ("name", "form"), [*(("qwen3_moe", form) for form in FORMATS), ("mixtral", "awq"), ("mixtral", "compressed-w4a16")]
)
def test_experts_have_exactly_the_values_that_codes_stand_for(
    name: str, form: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    own, plain = quantized(sources[name], tmp_path, form)
    stored = load_file(own / "model.safetensors")
    words = [tensor.dtype for name, tensor in stored.items() if ".experts.3." in name and "weight" in name]
    assert (torch.int8 if form == "compressed-int8" else torch.int32) in words
    model, expected = (load_model(Checkpoint.open(path), load_format="safetensors") for path in (own, plain))
    modules = zip(expert_modules(model), expert_modules(expected), strict=True)
    for (_, module), (_, other) in modules:
        for weight in NAMES:
            assert torch.equal(getattr(module, weight), getattr(other, weight))
        assert {name for name, _ in module.named_parameters()} == set(NAMES)


def test_groups_where_rules_give_some_layers_sizes_of_their_own(tmp_path: Path) -> None:
    """One group of down has as many columns as each of gate's two."""
    config = Qwen3MoeConfig(**WIDE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128)
    own, plain = quantized(tiny_models.save(config, tmp_path / "source"), tmp_path, "gptq")
    restate(own, dynamic={".*q_proj": {"bits": 4}})
    check_loads_alike(own, load_model(Checkpoint.open(plain)).state_dict())


def stored_one_by_one(folder: Path) -> Path:
    """A Qwen3-VL-MoE, whose own files have all experts in one tensor, as tools that quantize layers write it."""
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 256}
    text = WIDE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [24, 20, 20]}
    config = Qwen3VLMoeConfig(
        text_config=text | {"rope_parameters": rope}, vision_config=vision | {"deepstack_visual_indexes": [0]}
    )
    file = tiny_models.save(config, folder) / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("experts.down_proj")]:
        experts = name.removesuffix(".down_proj")
        down, gate_up = tensors.pop(name), tensors.pop(f"{experts}.gate_up_proj")
        for i in range(4):
            gate, up = gate_up[i].chunk(2)
            for layer, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down[i])):
                tensors[f"{experts}.{i}.{layer}.weight"] = weight.clone()
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def test_experts_one_by_one_of_a_class_whose_files_have_one_tensor(tmp_path: Path) -> None:
    source = stored_one_by_one(tmp_path / "source")
    stored, experts = load_file(source / "model.safetensors"), "model.language_model.layers.1.mlp.experts"
    module = load_model(Checkpoint.open(source), load_format="safetensors").get_submodule(experts)
    gate_up = [torch.cat([stored[f"{experts}.{i}.{part}_proj.weight"] for part in ("gate", "up")]) for i in range(4)]
    assert torch.equal(module.gate_up_proj, torch.stack(gate_up))
    assert torch.equal(module.down_proj, torch.stack([stored[f"{experts}.{i}.down_proj.weight"] for i in range(4)]))
    for form in ("awq", "fp8-block"):
        own, plain = quantized(source, tmp_path / form, form)
        check_loads_alike(own, load_model(Checkpoint.open(plain)).state_dict())


@pytest.mark.parametrize("form", FORMATS)
def test_4_bits_that_are_kept_compute_the_same(
    form: str, sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU."""
    own, plain = quantized(sources["qwen3_moe"], tmp_path, form)
    monkeypatch.setattr(packed_experts, "stays_packed", lambda device: True)
    model, expected = (load_model(Checkpoint.open(path), load_format="safetensors") for path in (own, plain))
    torch.manual_seed(0)
    x, ids, weights = torch.randn(5, 256), torch.arange(10).view(5, 2) % 4, torch.rand(5, 2)
    for (_, module), (_, other) in zip(expert_modules(model), expert_modules(expected), strict=True):
        of = weights_of(module)
        assert of is not None
        assert of.integers == (form in IN_ORDER)
        torch.testing.assert_close(module(x, ids, weights), other(x, ids, weights))


def test_scales_beyond_fp16_are_not_kept(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own, _ = quantized(sources["qwen3_moe"], tmp_path, "compressed-w4a16")
    file = own / "model.safetensors"
    stored = load_file(file)
    small = next(name for name in stored if ".experts.2.down_proj.weight_scale" in name)
    stored[small] *= 2.0**-14
    save_file(stored, file, metadata={"format": "pt"})
    monkeypatch.setattr(packed_experts, "stays_packed", lambda device: True)
    modules = [module for _, module in expert_modules(load_model(Checkpoint.open(own), load_format="safetensors"))]
    kept = [(of := weights_of(module)) is not None and of.integers for module in modules]
    assert sorted(kept) == [False, *[True] * (len(modules) - 1)]
    assert "too small or too large for fp16" in caplog.text


@pytest.mark.parametrize("form", [*IN_ORDER, "compressed-int8"])
def test_a_part_of_each_expert_on_each_rank(form: str, sources: dict[str, Path], tmp_path: Path) -> None:
    own, _ = quantized(sources["qwen3_moe"], tmp_path, form)
    check_same(own, 2, fused=True)


@pytest.mark.parametrize("form", ["awq", "gptq", "compressed-w4a16"])
def test_groups_are_divided_as_equally_as_can_be(form: str, tmp_path: Path) -> None:
    """Three on two ranks."""
    config = Qwen3MoeConfig(**WIDE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=384)
    own, _ = quantized(tiny_models.save(config, tmp_path / "source"), tmp_path, form)
    check_same(own, 2, fused=True)


@pytest.mark.parametrize("form", ["gptq", "gptq-desc-act"])
def test_whole_experts_are_divided_among_ranks(form: str, sources: dict[str, Path], tmp_path: Path) -> None:
    own, _ = quantized(sources["qwen3_moe"], tmp_path, form)
    check_same(own, 2, fused=True, whole_experts=True)


def test_experts_whose_groups_have_columns_on_several_ranks_are_refused(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    own, _ = quantized(sources["qwen3_moe"], tmp_path, "gptq-desc-act")
    with pytest.raises(UnsupportedModel, match=r"columns in another order .* \(--enable-expert-parallel divides whole"):
        load_all(own, 2)


def test_biases_of_experts_are_left_out_if_they_are_zero(sources: dict[str, Path], tmp_path: Path) -> None:
    """AutoGPTQ writes such."""
    own, _ = quantized(sources["mixtral"], tmp_path, "gptq")
    file = own / "model.safetensors"
    wanted, stored = load_model(Checkpoint.open(own), load_format="safetensors").state_dict(), load_file(file)
    names = [name.replace("qweight", "bias") for name in stored if ".experts." in name and name.endswith("qweight")]
    biases = {name: torch.zeros(256).half() for name in names}
    save_file({**stored, **biases}, file, metadata={"format": "pt"})
    found = load_model(Checkpoint.open(own), load_format="safetensors").state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())
    biases[names[-1]][7] = 0.5
    save_file({**stored, **biases}, file, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=f"the model has no .*{names[-1].rpartition('experts')[2]}"):
        load_model(Checkpoint.open(own))


def test_parts_that_cut_groups_are_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    own, _ = quantized(sources["qwen3_moe"], tmp_path, "awq")
    config = json.loads((own / "config.json").read_text())
    config["moe_intermediate_size"] = 128
    (own / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r"128 features of each expert .* in blocks of 128 cannot be divided"):
        load_all(own, 2)


@pytest.mark.parametrize("form", ["awq", "compressed-int8"])
def test_random_weights(form: str, sources: dict[str, Path], tmp_path: Path) -> None:
    own, _ = quantized(sources["qwen3_moe"], tmp_path, form)
    one, other = (load_model(Checkpoint.open(own), load_format="dummy") for _ in range(2))
    for (_, module), (_, same) in zip(expert_modules(one), expert_modules(other), strict=True):
        for name in NAMES:
            assert torch.equal(getattr(module, name), getattr(same, name))
            assert 0.01 < getattr(module, name).std() < 0.05
