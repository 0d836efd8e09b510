"""Published formats: each one's weights are exactly what it stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import HunYuanMoEV1Config

from engine.model.linear_method import UnquantizedLinear, method_of
from engine.model.load.checkpoint import Checkpoint
from engine.model.load.loader import load_model
from engine.model.quantization import choose_quantization
from engine.model.quantization.compressed_tensors import CompressedTensors
from tests.engine import tiny_models
from tests.engine.quantized_files import TINY, check_loads_alike, linear_weights
from tools.quantize import FORMATS, write

torch.set_num_threads(1)


@pytest.mark.parametrize("form", FORMATS)
def test_a_format_has_exactly_the_values_that_it_stands_for(form: str, tmp_path: Path) -> None:
    write(TINY, tmp_path / "q", form)
    write(TINY, tmp_path / "plain", form, dequantized=True)
    model = load_model(Checkpoint.open(tmp_path / "q"), load_format="safetensors")
    expected = load_file(tmp_path / "plain" / "model.safetensors")
    original = load_file(TINY / "model.safetensors")
    weights = linear_weights(model)
    for name, weight in weights.items():
        if name == "lm_head":  # tied to the embeddings
            continue
        assert torch.equal(weight, expected[f"{name}.weight"]), name
        assert type(method_of(model.get_submodule(name))) is UnquantizedLinear
        error = (weight - original[f"{name}.weight"].float()).norm() / original[f"{name}.weight"].float().norm()
        assert 0.001 < error < (0.04 if "8" in form else 0.3), name
    assert len(weights) == 5 * 7 + 1


@pytest.mark.parametrize(("method", "values"), [("fp8", 2.0**-4), ("int8", 0.501 / 127)])
@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_a_plain_checkpoint_is_quantized_while_it_loads(load_format: Any, method: str, values: float) -> None:
    checkpoint = Checkpoint.find("baton-tiny")
    plain = linear_weights(load_model(checkpoint, load_format=load_format))
    model = load_model(checkpoint, load_format=load_format, quantization=method)
    for name, weight in linear_weights(model).items():
        largest = plain[name].abs().amax(1, keepdim=True)
        relative = (weight - plain[name]).abs() / largest
        assert float(relative.max()) <= values, name
        assert (name == "lm_head") == (not relative.any()), name


@pytest.mark.parametrize("method", ["fp8", "int8"])
def test_routers_of_several_modules_stay_as_they_are(method: str, tmp_path: Path) -> None:
    config = HunYuanMoEV1Config(**tiny_models.SHAPE, num_experts=4, moe_topk=2)
    checkpoint = Checkpoint.open(tiny_models.save(config, tmp_path))
    plain, quantized = (linear_weights(load_model(checkpoint, quantization=form)) for form in (None, method))
    same = {name for name, weight in quantized.items() if torch.equal(weight, plain[name])}
    assert same == {"lm_head", "model.layers.0.mlp.gate.wg", "model.layers.1.mlp.gate.wg"}


def test_random_weights_of_a_quantized_checkpoint(tmp_path: Path) -> None:
    for form in ("fp8-block", "compressed-w4a16-asym", "awq", "gptq-desc-act", "compressed-int8"):
        write(TINY, tmp_path / form, form)
        (tmp_path / form / "model.safetensors").unlink()
        checkpoint = Checkpoint.open(tmp_path / form)
        one, other = (linear_weights(load_model(checkpoint, load_format="dummy")) for _ in range(2))
        for name, weight in one.items():
            assert torch.equal(weight, other[name])
            assert 0.005 < weight.std() < 0.1, (form, name)


@pytest.mark.parametrize("form", ["awq", "fp8"])
def test_random_weights_of_layers_whose_module_has_rules_for_them(form: str, tmp_path: Path) -> None:
    """As SigLIP's attention in Gemma 3, which transformers' rules for attention draw."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 1}
    source = tiny_models.save(tiny_models.within_a_larger_model(sizes), tmp_path / "source")
    write(source, tmp_path / form, form)
    (tmp_path / form / "model.safetensors").unlink()
    weights = linear_weights(load_model(Checkpoint.open(tmp_path / form), load_format="dummy"))
    drawn = {name: weight.std() for name, weight in weights.items() if "vision" in name and "q_proj" in name}
    assert drawn
    assert all(0.005 < std < 0.1 for std in drawn.values())


def test_packed_weights_with_one_scale(tmp_path: Path) -> None:
    models = list[dict[str, torch.Tensor]]()
    for strategy, size in (("tensor", (1,)), ("channel", None)):
        folder = tmp_path / strategy
        write(TINY, folder, "compressed-w4a16-channel")
        file, config = folder / "model.safetensors", folder / "config.json"
        stored = load_file(file)
        for name, tensor in stored.items():
            if name.endswith("weight_scale"):
                stored[name] = torch.full(size or tensor.shape, 0.01)
        save_file(stored, file, metadata={"format": "pt"})
        config.write_text(config.read_text().replace('"channel"', f'"{strategy}"'))
        models.append(linear_weights(load_model(Checkpoint.open(folder))))
    for name, weight in models[0].items():
        assert torch.equal(weight, models[1][name]), name


def test_a_layer_without_codes_in_the_files_stays_as_it_is(tmp_path: Path) -> None:
    write(TINY, tmp_path, "awq")
    file = tmp_path / "model.safetensors"
    tensors, plain = load_file(file), load_file(TINY / "model.safetensors")
    layer = "model.layers.2.mlp.down_proj"
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(layer)}
    tensors[f"{layer}.weight"] = plain[f"{layer}.weight"]
    tensors["model.layers.0.self_attn.k_scale"] = torch.ones(())  # for a KV cache of 8 bits
    save_file(tensors, file, metadata={"format": "pt"})
    model = load_model(Checkpoint.open(tmp_path), load_format="safetensors")
    assert torch.equal(model.get_submodule(layer).weight, plain[f"{layer}.weight"].float())


def test_groups_without_numbers_are_in_order(tmp_path: Path) -> None:
    write(TINY, tmp_path, "gptq")
    wanted = load_model(Checkpoint.open(tmp_path)).state_dict()
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("g_idx")]:
        tensors[name].zero_()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    check_loads_alike(tmp_path, wanted)


@pytest.mark.parametrize("form", ["awq", "gptq"])
def test_scales_keep_the_dtype_of_the_files(form: str, tmp_path: Path) -> None:
    """In fp16 this one would be 0."""
    write(TINY, tmp_path, form)
    tensors = load_file(tmp_path / "model.safetensors")
    layer = "model.layers.1.self_attn.q_proj"
    tensors[f"{layer}.scales"] = torch.full_like(tensors[f"{layer}.scales"], 1e-9, dtype=torch.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    weight = load_model(Checkpoint.open(tmp_path)).get_submodule(layer).weight
    codes = weight / tensors[f"{layer}.scales"][0, 0].float()
    assert torch.allclose(codes, codes.round(), atol=1e-4)
    assert codes.abs().max() > 5


@pytest.mark.parametrize(("form", "dtype"), [("compressed-w4a16", torch.bfloat16), ("compressed-fp8", torch.float32)])
def test_scales_of_four_bits_have_the_16_bits_that_their_kernel_takes(
    form: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    write(TINY, tmp_path, form)
    checkpoint, layer = Checkpoint.open(tmp_path), "model.layers.1.self_attn.q_proj"
    quantization = choose_quantization(checkpoint.config, checkpoint.weights, None)
    assert isinstance(quantization, CompressedTensors)
    rows, columns = load_file(TINY / "model.safetensors")[f"{layer}.weight"].shape
    assert quantization.tensors(layer, rows, columns)["weight_scale"].dtype is dtype


def test_what_the_weights_become_tells_models_apart() -> None:
    """Nodes share KV only if their fingerprints are equal."""
    checkpoint = Checkpoint.find("baton-tiny")
    assert len({checkpoint.fingerprint(quantization=method) for method in (None, "fp8", "int8")}) == 3
