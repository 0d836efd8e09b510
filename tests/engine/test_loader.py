"""Loading checkpoints: in which dtype, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV2Config, DeepseekV3Config, PreTrainedConfig

from engine.model.errors import UnsupportedModel
from engine.model.load import loader
from engine.model.load.checkpoint import Checkpoint
from engine.model.probe import probe
from tests.engine import tiny_models

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_models.save(tiny_models.CONFIGS["llama"], tmp_path_factory.mktemp("checkpoint"))
    weights = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


def change(file: Path, **values: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize(
    ("dtype", "expected"), [("auto", torch.float32), ("float32", torch.float32), ("bfloat16", torch.bfloat16)]
)
def test_on_a_cpu_everything_runs_in_fp32_unless_asked(checkpoint: Path, dtype: str, expected: torch.dtype) -> None:
    model = loader.load_model(Checkpoint.open(checkpoint), dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {expected}
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_an_unknown_dtype_names_the_flag(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="--dtype must be"):
        loader.load_model(Checkpoint.open(checkpoint), "int3")


def test_a_checkpoint_without_safetensors_is_refused(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match="no safetensors"):
        loader.load_model(Checkpoint.open(copy))


def test_a_damaged_file_that_transformers_reads_is_refused(copy: Path) -> None:
    """It does, for a dtype that cannot be read directly."""
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"dtype":"BF16"', b'"dtype":"F8_X"', 1))
    with pytest.raises(UnsupportedModel, match=r"cannot be loaded: .*header"):
        loader.load_model(Checkpoint.open(copy))


def test_sizes_that_are_not_those_of_the_files_are_named(copy: Path) -> None:
    change(copy / "config.json", intermediate_size=80)
    with pytest.raises(UnsupportedModel, match=r"cannot be loaded: model\.layers\.0\.mlp\.\w+\.weight is "):
        loader.load_model(Checkpoint.open(copy))


def test_code_that_comes_with_a_checkpoint_is_never_run(copy: Path) -> None:
    change(copy / "config.json", model_type="evil", auto_map={"AutoModelForCausalLM": "evil.Model"})
    (copy / "evil.py").write_text(f"open({str(copy / 'ran')!r}, 'w')")
    with pytest.raises(UnsupportedModel):
        loader.load_model(Checkpoint.open(copy))
    assert not (copy / "ran").exists()


MLA = {name: size for name, size in tiny_models.SHAPE.items() if name != "head_dim"} | {
    "num_key_value_heads": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize(
    "config",
    [DeepseekV2Config(**MLA), DeepseekV2Config(**MLA, rope_parameters=DYNAMIC), DeepseekV3Config(**MLA)],
    ids=["V2", "V2 with dynamic NTK", "V3"],
)
def test_latent_attention_is_refused_by_its_settings_before_weights_are_read(
    config: PreTrainedConfig, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)  # without weights
    says = "K has 16 + 8 numbers (qk_nope_head_dim, qk_rope_head_dim) and V 16 (v_head_dim)"
    with pytest.raises(UnsupportedModel, match=re.escape(says)):
        loader.load_model(Checkpoint.open(tmp_path))


def test_complex_angles_that_depend_on_the_batch_are_refused(tmp_path: Path) -> None:
    """Where K and V of latent attention are equally wide, it is served, but not with dynamic NTK."""
    DeepseekV2Config(**MLA | {"v_head_dim": 24}, rope_parameters=DYNAMIC).save_pretrained(tmp_path)
    model = loader.load_model(Checkpoint.open(tmp_path), load_format="dummy")
    with pytest.raises(UnsupportedModel, match="DeepseekV2RotaryEmbedding: it gives complex numbers"):
        probe(model, max_model_len=64)
