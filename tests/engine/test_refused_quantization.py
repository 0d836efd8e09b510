"""Quantized checkpoints that cannot be run: each is refused by the name of what it has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.model.errors import UnsupportedModel
from engine.model.load.checkpoint import Checkpoint
from engine.model.load.loader import load_model
from tests.engine.quantized_files import TINY, restate
from tools.quantize import write

torch.set_num_threads(1)


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
        ("compressed-int8", {"ignore": ["lm_head", 5]}, "is not as compressed-tensors has it: .*5 names no layers"),
        ("compressed-int8", {"ignore": ["re:("]}, r"is not as compressed-tensors has it: .*re:\( is no pattern"),
        ("compressed-fp8", {"format": "dense"}, "dense weights of 8 bits"),
        ("compressed-fp8", {"format": "pack-quantized"}, "pack-quantized weights of 8 bits, float"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(form: str, changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    write(TINY, tmp_path, form)
    restate(tmp_path, **changes)
    with pytest.raises(UnsupportedModel, match=reason):
        load_model(Checkpoint.open(tmp_path))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda scale: scale[1:], r"q_proj.weight_scale is \(255, 1\): neither one scale nor one for each of 256 rows"),
        (lambda scale: scale.expand(-1, 2), r"q_proj.weight_scale is \(256, 2\): neither"),
        (lambda scale: scale.repeat(2, 1), r"q_proj.weight_scale is \(512, 1\), not \(256, 1\) as in the model"),
    ],
)
def test_scales_of_other_numbers_of_rows_are_refused(change: Any, reason: str, tmp_path: Path) -> None:
    write(TINY, tmp_path, "fbgemm-fp8")
    file, name = tmp_path / "model.safetensors", "model.layers.0.self_attn.q_proj.weight_scale"
    tensors = load_file(file)
    save_file(tensors | {name: change(tensors[name]).contiguous()}, file, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=reason):
        load_model(Checkpoint.open(tmp_path))


def test_groups_of_a_negative_size_are_none(tmp_path: Path) -> None:
    """-1 is how other formats say that a row has one scale, which these files do not have."""
    write(TINY, tmp_path, "compressed-w4a16")
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": -1}
    restate(tmp_path, config_groups={"group_0": {"targets": ["Linear"], "weights": weights}})
    with pytest.raises(UnsupportedModel, match="weight_scale is"):
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


def test_a_request_that_contradicts_the_checkpoint_is_refused(tmp_path: Path) -> None:
    write(TINY, tmp_path, "gptq")
    checkpoint = Checkpoint.open(tmp_path)
    with pytest.raises(UnsupportedModel, match="quantized already, by gptq"):
        load_model(checkpoint, quantization="fp8")
    assert load_model(checkpoint, quantization="gptq")
    with pytest.raises(UnsupportedModel, match="awq: the checkpoint is not quantized"):
        load_model(Checkpoint.find("baton-tiny"), quantization="awq")


@pytest.mark.parametrize(
    ("form", "missing"),
    [("gptq-desc-act", "desc_act without g_idx"), ("compressed-w4a16", "actorder without weight_g_idx")],
)
def test_ordered_columns_whose_groups_the_files_do_not_say_are_refused(form: str, missing: str, tmp_path: Path) -> None:
    write(TINY, tmp_path, form)
    file = tmp_path / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if not name.endswith("g_idx")}
    save_file(kept, file, metadata={"format": "pt"})
    if form == "compressed-w4a16":
        config = json.loads((tmp_path / "config.json").read_text())
        groups = config["quantization_config"]["config_groups"]
        groups["group_0"]["weights"]["actorder"] = "weight"  # sorted by group when they were written
        restate(tmp_path, config_groups=groups)
        load_model(Checkpoint.open(tmp_path), load_format="safetensors")
        groups["group_0"]["weights"]["actorder"] = "group"
        restate(tmp_path, config_groups=groups)
    with pytest.raises(UnsupportedModel, match=f"{missing}, which says"):
        load_model(Checkpoint.open(tmp_path))


def test_groups_of_unequal_sizes_are_refused(tmp_path: Path) -> None:
    write(TINY, tmp_path, "gptq-desc-act")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.g_idx"][:] = 0
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match="g_idx"):
        load_model(Checkpoint.open(tmp_path))
