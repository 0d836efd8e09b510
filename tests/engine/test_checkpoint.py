"""Finding checkpoints and reading what their files say, once."""

from __future__ import annotations

import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BloomConfig, MambaConfig, T5Config

from baton.node_info import GenerationDefaults
from engine.model.errors import ModelNotFound, UnsupportedModel
from engine.model.load import loader
from engine.model.load.checkpoint import Checkpoint
from tests.engine import tiny_models

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tiny_models.CONFIGS["llama"], tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


def change(file: Path, **values: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_what_the_files_say(checkpoint: Path) -> None:
    assert Checkpoint.open(checkpoint).max_model_len == 512
    assert Checkpoint.open(checkpoint).vocab_size == tiny_models.VOCAB_SIZE


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (T5Config(), "transformers makes no model of model_type t5 as AutoModelForCausalLM"),
        (MambaConfig(), "mamba: layers of type linear_attention"),
        (BloomConfig(), "states no max_position_embeddings"),
    ],
)
def test_a_model_without_a_context_length_says_what_it_is(config: Any, why: str, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=why):
        _ = Checkpoint.open(tmp_path).max_model_len


def test_generation_defaults(copy: Path) -> None:
    change(copy / "generation_config.json", eos_token_id=[4, 2], temperature=0.6, top_p=0.9, do_sample=True)
    stated = Checkpoint.open(copy).generation_defaults
    assert stated == GenerationDefaults(eos_token_ids=(4, 2), temperature=0.6, top_p=0.9)
    (copy / "generation_config.json").unlink()
    assert Checkpoint.open(copy).generation_defaults == GenerationDefaults(eos_token_ids=(tiny_models.EOS,))
    change(copy / "config.json", eos_token_id=None)
    assert Checkpoint.open(copy).generation_defaults == GenerationDefaults()


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"eos_token_id": [4, -1]}, GenerationDefaults(eos_token_ids=(4,))),
        ({"eos_token_id": -1, "top_k": -1}, GenerationDefaults()),
        ({"top_k": 50.0}, GenerationDefaults(eos_token_ids=(tiny_models.EOS,), top_k=50)),
    ],
)
def test_generation_defaults_in_other_words(copy: Path, stated: dict[str, Any], expected: GenerationDefaults) -> None:
    (copy / "generation_config.json").write_text(json.dumps(stated))
    assert Checkpoint.open(copy).generation_defaults == expected


@pytest.mark.parametrize(
    "stated",
    [
        {"temperature": "0.6"},
        {"temperature": True},
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_k": 1.5},
        {"max_new_tokens": 0},
        {"eos_token_id": "2"},
        {"eos_token_id": [2, None]},
    ],
)
def test_generation_defaults_with_which_no_request_could_run(copy: Path, stated: dict[str, Any]) -> None:
    (copy / "generation_config.json").write_text(json.dumps(stated))
    with pytest.raises(UnsupportedModel, match=next(iter(stated))):
        Checkpoint.open(copy)


def test_fingerprints_tell_models_apart(checkpoint: Path, copy: Path) -> None:
    original = Checkpoint.open(checkpoint).fingerprint()
    assert len(original) == 64
    change(copy / "config.json", transformers_version="5.17.0")
    assert Checkpoint.open(copy).fingerprint() == original
    change(copy / "config.json", rope_theta=5.0)
    assert Checkpoint.open(copy).fingerprint() != original
    shutil.copy(checkpoint / "config.json", copy)
    assert Checkpoint.open(copy).fingerprint() == original
    tuned = {name: tensor * 1.01 for name, tensor in load_file(copy / "model.safetensors").items()}
    save_file(tuned, copy / "model.safetensors", metadata={"format": "pt"})
    assert Checkpoint.open(copy).fingerprint() != original


def test_a_configuration_is_read_once(copy: Path) -> None:
    """What is opened serves everybody, whatever happens to the files."""
    opened = Checkpoint.open(copy)
    known = (opened.max_model_len, opened.vocab_size, opened.generation_defaults, opened.fingerprint(dummy=True))
    for file in copy.iterdir():
        file.unlink()
    assert (opened.max_model_len, opened.vocab_size) == known[:2]
    assert (opened.generation_defaults, opened.fingerprint(dummy=True)) == known[2:]
    assert loader.load_model(opened, load_format="dummy").config.vocab_size == tiny_models.VOCAB_SIZE


@pytest.mark.parametrize("load_format", ["auto", "safetensors", "dummy"])
def test_loading_leaves_the_configuration_as_it_was(checkpoint: Path, load_format: loader.LoadFormat) -> None:
    """Another model may be made of it."""
    opened = Checkpoint.open(checkpoint)
    before = (opened.config.to_dict(), opened.config._attn_implementation)
    loader.load_model(opened, load_format=load_format)
    assert (opened.config.to_dict(), opened.config._attn_implementation) == before


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000], ids=["cut-off", "no-object", "deep"])
def test_a_file_that_cannot_be_parsed_is_named(copy: Path, name: str, text: str) -> None:
    (copy / name).write_text(text)
    with pytest.raises(UnsupportedModel, match=name.replace(".", r"\.")):
        Checkpoint.open(copy)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"hidden_size": "64"}, "config.json: .*'hidden_size' expected int, got str"),
        ({"quantization_config": "fp8"}, "config.json: AttributeError"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": "1e4"}},
            "cannot build it from its config.json: Type",
        ),
        ({"compression_config": ["fp8"]}, r"configuration of quantized weights is no object, but \['fp8'\]"),
        ({"num_key_value_heads": 0}, "cannot build it from its config.json: ZeroDivisionError"),
    ],
)
def test_values_that_transformers_does_not_expect_are_told_in_one_line(
    copy: Path, values: dict[str, Any], why: str
) -> None:
    change(copy / "config.json", **values)
    with pytest.raises(UnsupportedModel, match=why) as raised:
        loader.load_model(Checkpoint.open(copy))
    assert "\n" not in str(raised.value)


# ---- finding ----


def test_a_folder_is_itself(checkpoint: Path, tmp_path: Path) -> None:
    assert Checkpoint.find(str(checkpoint)).path == checkpoint
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        Checkpoint.find(str(tmp_path))


def test_the_embedded_model_needs_no_network() -> None:
    assert Checkpoint.find("baton-tiny").path.parts[-3:] == ("engine", "checkpoints", "baton-tiny")


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
    assert Checkpoint.find("somebody/something").path.name == "a" * 40
    assert Checkpoint.find("somebody/something", "tuned").path.name == "b" * 40
    for name, revision in (("somebody/else", None), ("somebody/something", "absent"), ("no such: name", None)):
        with pytest.raises(ModelNotFound) as missing:
            Checkpoint.find(name, revision)
        assert "\n" not in str(missing.value)
        assert name in str(missing.value)


class Gate(BaseHTTPRequestHandler):
    """A hub whose every model is gated, as huggingface.co answers without a token."""

    def do_GET(self) -> None:
        self.send_response(401)
        self.send_header("X-Error-Code", "GatedRepo")
        self.send_header("X-Error-Message", "Access to model somebody/gated is restricted.")
        self.end_headers()

    def log_message(self, *args: object) -> None: ...


def test_a_refusal_of_the_hub_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its errors begin with a line that has nothing but the status."""
    with HTTPServer(("127.0.0.1", 0), Gate) as hub:
        threading.Thread(target=hub.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
        with pytest.raises(ModelNotFound, match=r"somebody/gated is restricted\..*HF_TOKEN") as refused:
            Checkpoint.find("somebody/gated")
        hub.shutdown()
    assert "\n" not in str(refused.value)
