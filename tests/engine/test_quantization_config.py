"""What config.json states of a format, in all the ways that published checkpoints state it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.model.errors import UnsupportedModel
from engine.model.load import loader
from engine.model.load.checkpoint import Checkpoint
from engine.model.load.loader import load_model
from engine.model.quantization.stored import unpack_words
from tests.engine import tiny_models
from tests.engine.quantized_files import (
    TINY,
    check_loads_alike,
    linear_weights,
    restate,
    write_exponents,
    write_own_sizes,
)
from tests.engine.test_sharding import check_parts
from tools.quantize import write

torch.set_num_threads(1)


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
    check_loads_alike(tmp_path, wanted)


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
    check_loads_alike(tmp_path, wanted)
    config["quantization_config"]["config_groups"]["group_2"] = {**other, "targets": ["model.layers.0.mlp.up_proj"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r"converts model.layers.0.mlp.up_proj.weight, which is F8_E4M3"):
        load_model(Checkpoint.open(tmp_path))


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


def test_zero_points_as_older_versions_of_compressed_tensors_stored_them(tmp_path: Path) -> None:
    """Not in words, and less by half of the number of codes."""
    write(TINY, tmp_path, "compressed-w4a16-asym")
    wanted = load_model(Checkpoint.open(tmp_path)).state_dict()
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    names = [name for name in tensors if name.endswith("zero_point")]
    zeros = {name: (unpack_words(tensors[name], 4, 0) - 8).to(torch.int8).contiguous() for name in names}
    assert min(int(zero.min()) for zero in zeros.values()) < 0
    save_file(tensors | zeros, file, metadata={"format": "pt"})
    check_loads_alike(tmp_path, wanted)
    check_parts(tmp_path, 2, head_dim=32)


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


def test_a_dtype_that_only_the_language_models_part_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3-VL's config.json has it there alone. Scales are of another, so that the files do not tell."""
    monkeypatch.setattr(loader, "_on_cpu", lambda _: None)  # as on a GPU, where the checkpoint's dtype counts
    source = tiny_models.save(tiny_models.within_a_larger_model({"num_hidden_layers": 1}), tmp_path / "source")
    write(source, tmp_path / "q", "compressed-w4a16-channel")
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    del config["dtype"]
    config["text_config"]["dtype"] = "float16"
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    assert load_model(Checkpoint.open(tmp_path / "q"), load_format="safetensors").dtype == torch.float16


def test_targets_may_have_the_files_names_of_layers(tmp_path: Path) -> None:
    source = tiny_models.save(tiny_models.within_a_larger_model({"num_hidden_layers": 1}), tmp_path / "source")
    write(source, tmp_path / "q", "compressed-int8")
    wanted = load_model(Checkpoint.open(tmp_path / "q")).state_dict()
    stated = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    group = stated["config_groups"]["group_0"]
    stored, suffix = load_file(tmp_path / "q" / "model.safetensors"), ".weight_scale"
    names = [name.removesuffix(suffix) for name in stored if name.endswith(suffix)]
    assert any(name.startswith("language_model.model.layers.0.") for name in names)
    for targets in (names, [r"re:language_model\.model\.layers\.", "re:vision_tower"]):
        restate(tmp_path / "q", config_groups={"group_0": {**group, "targets": targets}})
        check_loads_alike(tmp_path / "q", wanted)


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
    layer = "model.layers.0.mlp.up_proj"
    for kind, other in [("data_type", "mx_fp"), *([("bits", 8), ("group_size", 64)] if form == "awq" else [])]:
        restate(tmp_path, extra_config={layer: {kind: other}})
        with pytest.raises(UnsupportedModel, match=rf"a {kind} of its own for {layer} \(extra_config\)"):
            load_model(Checkpoint.open(tmp_path))
    restate(tmp_path, extra_config={}, packing_format="auto_round:llm_compressor")
    with pytest.raises(UnsupportedModel, match="AutoRound's packing_format auto_round:llm_compressor of int: only"):
        load_model(Checkpoint.open(tmp_path))


def test_gptqs_form_by_its_other_name(tmp_path: Path) -> None:
    """Its zero points are not less by one; whether these are is all that the forms differ in."""
    write(TINY, tmp_path, "gptq-asym")
    wanted = load_model(Checkpoint.open(tmp_path)).state_dict()
    restate(tmp_path, checkpoint_format=None, format="gptq_v2")
    check_loads_alike(tmp_path, wanted)


@pytest.mark.parametrize(("form", "one"), [("gptq-asym", 0x11111111), ("gptq-8bit", 0x01010101)])
def test_gptqs_first_form_is_less_by_one_in_each_code_of_a_whole_word(form: str, one: int, tmp_path: Path) -> None:
    """As GPTQModel writes and reads it: a zero point of 0 borrows from the next one."""
    write(TINY, tmp_path, form)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    zeros = {name: zero.random_(-(2**31), 2**31) for name, zero in tensors.items() if name.endswith("qzeros")}
    restate(tmp_path, checkpoint_format="gptq_v2")
    save_file(tensors, file, metadata={"format": "pt"})
    wanted = load_model(Checkpoint.open(tmp_path)).state_dict()
    restate(tmp_path, checkpoint_format="gptq")
    save_file(tensors | {name: zero - one for name, zero in zeros.items()}, file, metadata={"format": "pt"})
    check_loads_alike(tmp_path, wanted)


def test_rules_that_give_layers_sizes_of_their_own_are_what_the_files_show(tmp_path: Path) -> None:
    wanted = write_own_sizes(tmp_path)
    check_loads_alike(tmp_path, wanted)
    own = {"down_proj": {"bits": 8}, "up_proj": {"group_size": 64}}
    rules = {f"model.layers.{i}.mlp.{layer}": sizes for i in range(5) for layer, sizes in own.items()}
    restate(tmp_path, quant_method="auto-round", packing_format="auto_round:auto_gptq", dynamic={}, extra_config=rules)
    check_loads_alike(tmp_path, wanted)


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        ("qzeros", lambda zeros: zeros[:, ::2], "q_proj: GPTQ with 2 bits: only 4 and 8"),
        ("scales", lambda scales: scales[:0], "q_proj: qweight, qzeros and scales are not as GPTQ has them"),
    ],
)
def test_sizes_that_no_layer_can_have_are_refused(kind: str, change: Any, reason: str, tmp_path: Path) -> None:
    write(TINY, tmp_path, "gptq")
    restate(tmp_path, dynamic={".*": {"bits": 2}})
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = f"model.layers.0.self_attn.q_proj.{kind}"
    save_file({**tensors, name: change(tensors[name]).contiguous()}, file, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=reason):
        load_model(Checkpoint.open(tmp_path))


def test_scales_of_blocks_may_be_exponents(tmp_path: Path) -> None:
    check_loads_alike(tmp_path, write_exponents(tmp_path))


def test_rules_that_leave_layers_out_are_what_the_files_show(tmp_path: Path) -> None:
    write(TINY, tmp_path, "gptq")
    restate(tmp_path, dynamic={"-:.*lm_head": {}})
    load_model(Checkpoint.open(tmp_path), load_format="safetensors")
