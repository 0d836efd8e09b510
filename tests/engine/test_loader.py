"""Finding checkpoints and reading what their files say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.messages import GenerationDefaults
from engine.model import loader
from engine.model.errors import ModelNotFound, UnsupportedModel
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


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_on_a_cpu_everything_runs_in_fp32(checkpoint: Path, dtype: str) -> None:
    model = loader.load_model(checkpoint, dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_an_unknown_dtype_names_the_flag(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="--dtype must be"):
        loader.load_model(checkpoint, "int3")


def test_what_the_files_say(checkpoint: Path) -> None:
    assert loader.max_model_len(checkpoint) == 512
    assert loader.vocab_size(checkpoint) == tiny_models.VOCAB_SIZE


def test_generation_defaults(copy: Path) -> None:
    change(copy / "generation_config.json", eos_token_id=[4, 2], temperature=0.6, top_p=0.9, do_sample=True)
    stated = loader.generation_defaults(copy)
    assert stated == GenerationDefaults(eos_token_ids=(4, 2), temperature=0.6, top_p=0.9)
    (copy / "generation_config.json").unlink()
    assert loader.generation_defaults(copy) == GenerationDefaults(eos_token_ids=(tiny_models.EOS,))
    change(copy / "config.json", eos_token_id=None)
    assert loader.generation_defaults(copy) == GenerationDefaults()


def test_fingerprints_tell_models_apart(checkpoint: Path, copy: Path) -> None:
    original = loader.fingerprint(checkpoint)
    assert len(original) == 64
    change(copy / "config.json", transformers_version="5.17.0")
    assert loader.fingerprint(copy) == original
    change(copy / "config.json", rope_theta=5.0)
    assert loader.fingerprint(copy) != original
    shutil.copy(checkpoint / "config.json", copy)
    assert loader.fingerprint(copy) == original
    tuned = {name: tensor * 1.01 for name, tensor in load_file(copy / "model.safetensors").items()}
    save_file(tuned, copy / "model.safetensors", metadata={"format": "pt"})
    assert loader.fingerprint(copy) != original


def test_a_checkpoint_without_safetensors_is_refused(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match="no safetensors"):
        loader.load_model(copy)


def test_code_that_comes_with_a_checkpoint_is_never_run(copy: Path) -> None:
    change(copy / "config.json", model_type="evil", auto_map={"AutoModelForCausalLM": "evil.Model"})
    (copy / "evil.py").write_text(f"open({str(copy / 'ran')!r}, 'w')")
    with pytest.raises(UnsupportedModel):
        loader.load_model(copy)
    assert not (copy / "ran").exists()


# ---- finding ----


def test_a_folder_is_itself(checkpoint: Path, tmp_path: Path) -> None:
    assert loader.resolve_model(str(checkpoint)) == checkpoint
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        loader.resolve_model(str(tmp_path))


def test_the_embedded_model_needs_no_network() -> None:
    assert loader.resolve_model("baton-tiny").parts[-3:] == ("engine", "checkpoints", "baton-tiny")


def test_offline_a_hub_id_comes_from_the_cache(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--somebody--something"
    for commit in ("a" * 40, "b" * 40):
        shutil.copytree(checkpoint, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    (repository / "refs" / "tuned").write_text("b" * 40)
    assert loader.resolve_model("somebody/something").name == "a" * 40
    assert loader.resolve_model("somebody/something", "tuned").name == "b" * 40
    for name, revision in (("somebody/else", None), ("somebody/something", "absent"), ("no such: name", None)):
        with pytest.raises(ModelNotFound) as missing:
            loader.resolve_model(name, revision)
        assert "\n" not in str(missing.value)
        assert name in str(missing.value)
