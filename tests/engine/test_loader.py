"""Loading checkpoints: in which dtype, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.model.errors import UnsupportedModel
from engine.model.load import loader
from engine.model.load.checkpoint import Checkpoint
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


def test_code_that_comes_with_a_checkpoint_is_never_run(copy: Path) -> None:
    change(copy / "config.json", model_type="evil", auto_map={"AutoModelForCausalLM": "evil.Model"})
    (copy / "evil.py").write_text(f"open({str(copy / 'ran')!r}, 'w')")
    with pytest.raises(UnsupportedModel):
        loader.load_model(Checkpoint.open(copy))
    assert not (copy / "ran").exists()
