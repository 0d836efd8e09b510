"""Published formats: each one's weights are exactly what it stands for, and what cannot be run is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton_kernels.packed_linear import can_pack_int4
from baton_kernels.quantized_linear import FourBitWeight, QuantizedWeight, arrange, dequantize, linear, pack_halves
from baton_kernels.quantized_linear.four_bits import has_order
from engine.checkpoint import EMBEDDED
from engine.model import fast
from engine.model.attention import probe
from engine.model.errors import UnsupportedModel
from engine.model.fast.forwards import logits_as_served
from engine.model.fast.target import Target
from engine.model.linear_method import UnquantizedLinear, method_of
from engine.model.load.checkpoint import Checkpoint
from engine.model.load.loader import load_model
from engine.model.quantization import choose_quantization
from engine.model.quantization.compressed_tensors import CompressedTensors
from engine.model.quantization.linear import LinearOfFourBits, QuantizedLinear, install
from engine.model.tolerance import close
from tests.engine import tiny_models
from tools.quantize import FORMATS, write

torch.set_num_threads(1)

TINY = EMBEDDED["baton-tiny"]


def linear_weights(model: Any) -> dict[str, Tensor]:
    return {name: module.weight for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}


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


def test_random_weights_of_a_quantized_checkpoint(tmp_path: Path) -> None:
    for form in ("fp8-block", "compressed-w4a16-asym", "awq", "gptq-desc-act", "compressed-int8"):
        write(TINY, tmp_path / form, form)
        (tmp_path / form / "model.safetensors").unlink()
        checkpoint = Checkpoint.open(tmp_path / form)
        one, other = (linear_weights(load_model(checkpoint, load_format="dummy")) for _ in range(2))
        for name, weight in one.items():
            assert torch.equal(weight, other[name])
            assert 0.005 < weight.std() < 0.1, (form, name)


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


def test_targets_and_exceptions_of_compressed_tensors(tmp_path: Path) -> None:
    write(TINY, tmp_path, "compressed-int8")
    config = json.loads((tmp_path / "config.json").read_text())
    stated = config["quantization_config"]
    stated["ignore"] = ["re:.*down_proj", "model.layers.0.mlp.up_proj", "lm_head"]
    stated["config_groups"]["group_0"]["targets"] = ["re:.*proj$"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    plain = load_file(TINY / "model.safetensors")
    kept = load_file(tmp_path / "model.safetensors")
    ignored = [name for name in plain if "down_proj" in name or name == "model.layers.0.mlp.up_proj.weight"]
    for name in ignored:
        kept[name] = plain[name]
        del kept[f"{name}_scale"]
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    weights = linear_weights(load_model(Checkpoint.open(tmp_path), load_format="safetensors"))
    for name, weight in weights.items():
        same = torch.equal(weight, plain.get(f"{name}.weight", weight).float())
        assert same == (f"{name}.weight" in ignored or name == "lm_head"), name


@pytest.mark.parametrize(
    ("form", "changes", "reason"),
    [
        ("awq", {"bits": 3}, "AWQ with 3 bits"),
        ("awq", {"version": "gemv"}, "version gemv"),
        ("awq", {"version": None, "checkpoint_format": "gemv"}, "version gemv"),
        ("gptq", {"bits": 2}, "GPTQ with 2 bits"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format marlin"),
        ("gptq", {"checkpoint_format": None, "format": "bitblas"}, "checkpoint_format bitblas"),
        ("gptq", {"is_marlin_format": True}, "checkpoint_format marlin"),
        ("gptq", {"pack_dtype": "int16"}, "words of int16"),
        ("gptq", {"checkpoint_format": "gptq_v2"}, "zero points are 7, not 8 .* is not gptq_v2"),
        ("gptq-8bit", {"checkpoint_format": "gptq_v2"}, "zero points are 127, not 128"),
        ("gptq", {"dynamic": {"-:.*": {}, "+:.*": {"bits": 8}}}, "dynamic"),
        ("gptq", {"group_size": 96}, "groups of 96"),
        ("fp8-block", {"weight_block_size": [64, 128]}, "square"),
        ("fp8", {"weight_block_size": [128, 128]}, r"q_proj.weight_scale is \(\), not one scale for each block of 128"),
        ("fp8-block", {"weight_block_size": 128}, "quantization_config is not as fp8 has it: TypeError"),
        ("gptq", {"group_size": None}, "quantization_config is not as gptq has it"),
        ("compressed-fp8", {"config_groups": {"FP8": ["Linear"]}}, "is not as compressed-tensors has it"),
        ("compressed-int8", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ("compressed-int8", {"transform_config": {"config_groups": {"r1": {}}}}, "transform_config"),
        ("compressed-int8", {"quantization_status": "calibration"}, "calibration"),
        ("compressed-w4a16", {"format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
        ("compressed-int8", {"ignore": ["lm_head", "re:.*down_proj"]}, "the model has no .*down_proj.weight_scale"),
        ("compressed-int8", {"format": "marlin-24"}, "marlin-24 weights of 8 bits"),
        ("compressed-fp8", {"format": "dense"}, "dense weights of 8 bits"),
        ("compressed-fp8", {"format": "pack-quantized"}, "pack-quantized weights of 8 bits, float"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(form: str, changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    write(TINY, tmp_path, form)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=reason):
        load_model(Checkpoint.open(tmp_path))


@pytest.mark.parametrize("method", ["ptpc_fp8", "FP8", "marlin"])
def test_a_format_that_nobody_knows_is_refused_by_name(method: str, tmp_path: Path) -> None:
    write(TINY, tmp_path, "fp8")
    restate(tmp_path, quant_method=method)
    with pytest.raises(
        UnsupportedModel, match=f"quantized by {method}, which cannot be run; what can: auto-round, awq, compressed"
    ):
        load_model(Checkpoint.open(tmp_path))


def test_a_format_of_transformers_that_this_machine_cannot_run_is_refused(tmp_path: Path) -> None:
    write(TINY, tmp_path, "awq")
    restate(tmp_path, quant_method="fp_quant")
    with pytest.raises(UnsupportedModel, match="cannot be loaded: "):
        load_model(Checkpoint.open(tmp_path))


@pytest.mark.parametrize("form", ["fp8", "compressed-int8", "awq", "compressed-w4a16"])
def test_codes_without_a_format_are_refused_by_name(form: str, tmp_path: Path) -> None:
    write(TINY, tmp_path, form)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    for requested in (None, "fp8"):
        with pytest.raises(UnsupportedModel, match=r"of a quantized weight, but config\.json states no format"):
            load_model(Checkpoint.open(tmp_path), quantization=requested)


def test_what_a_format_has_no_use_for_is_told_and_not_left_to_transformers(tmp_path: Path) -> None:
    write(TINY, tmp_path, "gptq")
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "model.layers.1.mlp.extra": torch.rand(4)}, file, metadata={"format": "pt"})
    for requested in (None, "gptq"):
        with pytest.raises(UnsupportedModel, match=r"the model has no model.layers.1.mlp.extra"):
            load_model(Checkpoint.open(tmp_path), quantization=requested)


def test_fp8_of_model_optimizer(tmp_path: Path) -> None:
    """The same tensors by another name, with scales of inputs and KV, which are not used."""
    write(TINY, tmp_path / "own", "fp8")
    write(TINY, tmp_path / "plain", "fp8", dequantized=True)
    file = tmp_path / "own" / "model.safetensors"
    unused = {f"model.layers.0.self_attn.{part}": torch.ones(()) for part in ("q_proj.input_scale", "k_proj.k_scale")}
    save_file({**load_file(file), **unused}, file, metadata={"format": "pt"})
    restate(tmp_path / "own", quant_method="modelopt", quant_algo="FP8")
    own, plain = (load_model(Checkpoint.open(tmp_path / name)).state_dict() for name in ("own", "plain"))
    assert all(torch.equal(tensor, plain[name]) for name, tensor in own.items())
    restate(tmp_path / "own", quant_algo="NVFP4")
    with pytest.raises(UnsupportedModel, match="quantized by modelopt, which cannot be run"):
        load_model(Checkpoint.open(tmp_path / "own"))


def test_the_older_name_of_compressed_tensors_configuration(tmp_path: Path) -> None:
    write(TINY, tmp_path, "compressed-fp8")
    wanted = load_model(Checkpoint.open(tmp_path)).state_dict()
    config = json.loads((tmp_path / "config.json").read_text())
    config["compression_config"] = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = load_model(Checkpoint.open(tmp_path)).state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())


def test_a_layers_name_counts_more_than_a_pattern_and_that_more_than_its_class(tmp_path: Path) -> None:
    """In whichever order the groups stand."""
    write(TINY, tmp_path, "compressed-fp8")
    wanted = load_model(Checkpoint.open(tmp_path)).state_dict()
    config = json.loads((tmp_path / "config.json").read_text())
    (group,) = config["quantization_config"]["config_groups"].values()
    other = {**group, "weights": {**group["weights"], "type": "int"}}
    chosen = {**group, "targets": ["re:model"]}
    config["quantization_config"]["config_groups"] = {"group_0": {**other, "targets": ["Linear"]}, "group_1": chosen}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = load_model(Checkpoint.open(tmp_path)).state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())
    config["quantization_config"]["config_groups"]["group_2"] = {**other, "targets": ["model.layers.0.mlp.up_proj"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r"converts model.layers.0.mlp.up_proj.weight, which is F8_E4M3"):
        load_model(Checkpoint.open(tmp_path))


def check_loads_alike(folder: Path, wanted: dict[str, Tensor]) -> None:
    found = load_model(Checkpoint.open(folder), load_format="safetensors").state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())


def test_the_configuration_of_compressed_tensors_within_another(tmp_path: Path) -> None:
    """As transformers has written it, with blocks in words."""
    write(TINY, tmp_path, "compressed-fp8-block")
    wanted = load_model(Checkpoint.open(tmp_path)).state_dict()
    config = json.loads((tmp_path / "config.json").read_text())
    inner = config["quantization_config"]
    inner["config_groups"]["group_0"]["weights"]["block_structure"] = "128x128"
    outer = {"quant_method": "compressed-tensors", "quantization_config": inner, "sparsity_config": {}}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": outer}))
    check_loads_alike(tmp_path, wanted)


def test_layers_without_scales_are_not_quantized_whatever_is_ignored(tmp_path: Path) -> None:
    """Files of another version of transformers name them differently; lm_head has the embeddings' weight."""
    write(TINY, tmp_path, "compressed-int8")
    restate(tmp_path, ignore=["language_model.model.layers.0.mlp.up_proj"])
    file, layer = tmp_path / "model.safetensors", "model.layers.0.mlp.up_proj"
    tensors = load_file(file)
    tensors[f"{layer}.weight"] = load_file(TINY / "model.safetensors")[f"{layer}.weight"]
    del tensors[f"{layer}.weight_scale"]
    unused = ("k_scale", "k_zero_point", "v_proj.output_zero_point")  # of an 8-bit KV cache
    tensors |= {f"model.layers.0.self_attn.{name}": torch.zeros(1) for name in unused}
    save_file(tensors, file, metadata={"format": "pt"})
    model = load_model(Checkpoint.open(tmp_path), load_format="safetensors")
    assert torch.equal(model.get_submodule(layer).weight, tensors[f"{layer}.weight"].float())
    tensors[f"{layer}.weight"] = tensors[f"{layer}.weight"].to(torch.int8)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=f"{layer}.weight, which is I8"):
        load_model(Checkpoint.open(tmp_path))


@pytest.mark.parametrize("form", ["awq", "fp8", "compressed-fp8-tensor"])
def test_layers_of_a_language_model_that_files_call_otherwise(form: str, tmp_path: Path) -> None:
    """Gemma 3, with its configuration where some checkpoints have it."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 1}
    source = tiny_models.save(tiny_models.within_a_larger_model(sizes), tmp_path / "source")
    write(source, tmp_path / "q", form)
    write(source, tmp_path / "plain", form, dequantized=True)
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    config["text_config"]["quantization_config"] = config.pop("quantization_config")
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    assert any("language_model.model" in name for name in load_file(tmp_path / "q" / "model.safetensors"))
    check_loads_alike(tmp_path / "q", load_model(Checkpoint.open(tmp_path / "plain")).state_dict())


def restate(folder: Path, **changes: Any) -> None:
    """What config.json states of the format."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("form", ["gptq", "awq"])
def test_auto_rounds_files_are_those_of_other_formats(form: str, tmp_path: Path) -> None:
    write(TINY, tmp_path, form)
    wanted = load_model(Checkpoint.open(tmp_path)).state_dict()
    config = json.loads((tmp_path / "config.json").read_text())
    own = {"bits": 4, "group_size": 128, "sym": form == "gptq", "data_type": "int"}
    own |= {"quant_method": "auto-round", "packing_format": f"auto_round:auto_{form}"}
    own["extra_config"] = {"lm_head": {"bits": 16, "data_type": "float"}, "model.layers.0.mlp.up_proj": {"bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": own}))
    check_loads_alike(tmp_path, wanted)
    restate(tmp_path, extra_config={"model.layers.0.mlp.up_proj": {"bits": 8}})
    with pytest.raises(UnsupportedModel, match=r"sizes of their own .*extra_config: model.layers.0.mlp.up_proj"):
        load_model(Checkpoint.open(tmp_path))
    restate(tmp_path, extra_config={}, packing_format="auto_round:llm_compressor")
    with pytest.raises(UnsupportedModel, match="AutoRound's packing_format auto_round:llm_compressor of int: only"):
        load_model(Checkpoint.open(tmp_path))


def test_gptqs_form_by_its_other_name(tmp_path: Path) -> None:
    """Its zero points are not less by one; whether these are is all that the forms differ in."""
    write(TINY, tmp_path, "gptq-asym")
    wanted = load_model(Checkpoint.open(tmp_path)).state_dict()
    restate(tmp_path, checkpoint_format=None, format="gptq_v2")
    found = load_model(Checkpoint.open(tmp_path)).state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())


def test_rules_that_leave_layers_out_are_what_the_files_show(tmp_path: Path) -> None:
    write(TINY, tmp_path, "gptq")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["dynamic"] = {"-:.*lm_head": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    load_model(Checkpoint.open(tmp_path), load_format="safetensors")


def test_a_request_that_contradicts_the_checkpoint_is_refused(tmp_path: Path) -> None:
    write(TINY, tmp_path, "gptq")
    checkpoint = Checkpoint.open(tmp_path)
    with pytest.raises(UnsupportedModel, match="quantized already, by gptq"):
        load_model(checkpoint, quantization="fp8")
    assert load_model(checkpoint, quantization="gptq")
    with pytest.raises(UnsupportedModel, match="awq: the checkpoint is not quantized"):
        load_model(Checkpoint.find("baton-tiny"), quantization="awq")


def test_groups_of_unequal_sizes_are_refused(tmp_path: Path) -> None:
    write(TINY, tmp_path, "gptq-desc-act")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.g_idx"][:] = 0
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match="g_idx"):
        load_model(Checkpoint.open(tmp_path))


def test_groups_without_numbers_are_in_order(tmp_path: Path) -> None:
    write(TINY, tmp_path, "gptq")
    wanted = load_model(Checkpoint.open(tmp_path)).state_dict()
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("g_idx")]:
        tensors[name].zero_()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = load_model(Checkpoint.open(tmp_path)).state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())


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


# ---- as on a GPU, where weights stay quantized ----


def quantized_method(rows: int, columns: Tensor | None = None, group: int = 64) -> QuantizedLinear:
    scale, zero = torch.rand(rows, 256 // group) + 0.5, torch.randint(0, 16, (rows, 256 // group), dtype=torch.uint8)
    values = pack_halves(torch.randint(0, 16, (rows, 256)), 2 * group)
    return QuantizedLinear(QuantizedWeight(values, scale, zero, group), None, torch.float32, columns)


def test_methods_of_one_form_become_one_and_share_its_memory() -> None:
    torch.manual_seed(0)
    columns = torch.randperm(256)
    parts = [quantized_method(rows, columns) for rows in (64, 32)]
    x = torch.randn(3, 256)
    expected = torch.cat([part.reference(x) for part in parts], 1)
    assert QuantizedLinear.can_concatenate(parts)
    whole = QuantizedLinear.concatenate(parts)
    assert torch.allclose(whole.make_product()(x), expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(expected[:, :64], linear(x[:, columns], parts[0].weight))
    assert parts[1].weight.values.untyped_storage().data_ptr() == whole.weight.values.untyped_storage().data_ptr()
    assert not QuantizedLinear.can_concatenate([parts[0], quantized_method(64, columns.flip(0))])
    assert not QuantizedLinear.can_concatenate([parts[0], quantized_method(64)])
    assert not QuantizedLinear.can_concatenate([parts[0], quantized_method(64, columns, 128)])


def four_bit_part(rows: int, asymmetric: bool = True) -> LinearOfFourBits:
    codes = quantized_method(rows, group=128).weight
    codes = codes if asymmetric else replace(codes, zero=None)
    return LinearOfFourBits(dequantize(codes, torch.bfloat16), None, codes)


def test_layers_of_4_bits_become_one_on_a_cpu_whatever_their_rows_and_zeros() -> None:
    """Few rows are multiplied by codes if all have one form, and together fill the blocks of the kernel."""
    torch.manual_seed(0)
    x, asymmetric = torch.randn(2, 256).bfloat16(), {"all": (True, True), "some": (True, False)}
    for rows, zeros, has_few in (((96, 32), "all", True), ((64, 32), "all", False), ((96, 32), "some", False)):
        parts = [four_bit_part(num, own) for num, own in zip(rows, asymmetric[zeros], strict=True)]
        expected = torch.cat([part.reference(x) for part in parts], 1)
        assert LinearOfFourBits.can_concatenate(parts)
        whole = LinearOfFourBits.concatenate(parts)
        product = whole.make_product()
        freed = whole.pack(x)
        assert close(product(x), expected, whole.tolerance)
        if freed and can_pack_int4(256, 128, torch.bfloat16):
            assert whole._packed is not None
            assert (whole._packed.few is not None) == has_few


@pytest.mark.parametrize("sorted_columns", [False, True])
def test_products_go_on_with_weights_in_another_order(sorted_columns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU that has a kernel for it; here the product is plain torch's."""
    monkeypatch.setattr("engine.model.quantization.linear.can_arrange", lambda weight, dtype: has_order(weight))
    torch.manual_seed(0)
    method = quantized_method(64, torch.randperm(256) if sorted_columns else None, group=128)
    weight = replace(method.weight, scale=method.weight.scale.half())
    method = QuantizedLinear(weight, torch.randn(64), torch.float32, method.columns)
    x, product = torch.randn(3, 256), method.make_product()
    expected = product(x)
    freed = method.pack(x)
    assert [tensor.data_ptr() for tensor in freed] == [
        tensor.data_ptr() for tensor in (weight.values, weight.scale, weight.zero) if tensor is not None
    ]
    for tensor in freed:
        tensor.zero_()
    assert torch.allclose(product(x), expected, rtol=1e-5, atol=1e-4)
    assert method.weight.four_bits
    assert not any(tensor.numel() for tensor in (method.weight.values, method.weight.scale, method.weight.zero))


@pytest.mark.parametrize("gated", [False, True])
def test_a_product_that_differs_in_the_other_order_is_not_taken(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.model.quantization.linear.can_arrange", lambda weight, dtype: has_order(weight))
    method = quantized_method(64, group=128)
    weight = replace(method.weight, scale=method.weight.scale.half())
    method = QuantizedLinear(weight, None, torch.float32)
    if gated:
        method._activation = "silu"  # as the gated product, which a CPU makes in two steps, would note
        monkeypatch.setattr("engine.model.quantization.linear.gated_linear", lambda x, weight, *_: wrong(x, weight))
    else:
        arranged = arrange(replace(weight, scale=2 * weight.scale))
        monkeypatch.setattr("engine.model.quantization.linear.arrange", lambda weight: arranged)
    x = torch.randn(3, 256)
    expected = method.make_product()(x)
    assert method.pack(x) == []
    assert torch.equal(method.make_product()(x), expected)


def wrong(x: Tensor, weight: QuantizedWeight | FourBitWeight) -> Tensor:
    """Of an arranged weight."""
    return x * (2 if isinstance(weight, FourBitWeight) else 1)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMATS)
def test_on_a_gpu_weights_stay_quantized_and_logits_agree(form: str, tmp_path: Path) -> None:
    """Within what rounding to bf16, and inputs of 8 bits, can change."""
    write(TINY, tmp_path / "q", form)
    write(TINY, tmp_path / "plain", form, dequantized=True)
    logits = []
    for folder in ("q", "plain"):
        model = load_model(Checkpoint.open(tmp_path / folder), "bfloat16", "cuda", "safetensors")
        probed = probe(model, 128)
        report = fast.apply(model, probed, 128)
        assert report.taken_back is None
        assert not any(tally.refused for tally in report.pieces.values()), str(report)
        with torch.inference_mode():
            logits.append(logits_as_served(Target(model, probed.layers, 128), probed.kv))
        if folder == "q":
            method = method_of(model.get_submodule("model.layers.0.mlp.down_proj"))
            assert isinstance(method, QuantizedLinear)
    difference = (logits[0] - logits[1]).norm(dim=-1) / logits[1].norm(dim=-1)
    assert difference.median() < 0.05


@pytest.mark.gpu
def test_install_keeps_one_copy_on_a_gpu() -> None:
    module = torch.nn.Linear(256, 128, bias=False, device="cuda", dtype=torch.bfloat16)
    weight = QuantizedWeight(torch.randn(128, 256, device="cuda").to(torch.float8_e4m3fn), torch.rand(128, 1).cuda())
    method = install(module, weight, torch.bfloat16)
    assert {name for name, _ in module.named_parameters()} == {"weight", "weight_scale"}
    assert isinstance(method, QuantizedLinear)
    assert method.weight.values is module.weight
    x = torch.randn(4, 256, device="cuda", dtype=torch.bfloat16)
    expected = x.float() @ dequantize(weight, torch.float32).T
    assert torch.allclose(method.make_product()(x).float(), expected, atol=2e-2 * float(expected.abs().max()))


def test_what_the_weights_become_tells_models_apart() -> None:
    """Nodes share KV only if their fingerprints are equal."""
    checkpoint = Checkpoint.find("baton-tiny")
    assert len({checkpoint.fingerprint(quantization=method) for method in (None, "fp8", "int8")}) == 3
