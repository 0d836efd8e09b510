"""The training of baton-tiny-moe computes what transformers computes, and writes what a node reads."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.checkpoint import EMBEDDED
from engine.model import fast
from engine.model.load.checkpoint import Checkpoint
from engine.model.load.loader import load_model
from engine.model.probe import probe
from tools import tiny_tasks
from tools.tiny.training.codec import Codec
from tools.tiny.training.evaluate import prompt_ids
from tools.tiny.training.forward import head_logits
from tools.tiny.training.mixture import WINDOW, MixtureForward, forward_of, mixture_config, routing_weights
from tools.tiny.training.model import model_config, new_model, save
from tools.tiny.training.settings import Settings
from tools.tiny.training.tokenizer import CHAT_TEMPLATE, VOCAB_SIZE
from tools.train_tiny import parse

torch.set_num_threads(1)

FOLDER = EMBEDDED["baton-tiny-moe"]
LENGTHS = [(2, WINDOW + 40), (3, 17)]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return parse(["--out", str(tmp_path_factory.mktemp("moe")), "--mixture", "--smoke", "--device", "cpu"])[0]


@pytest.fixture(scope="module")
def model() -> Any:
    made: Any = new_model(0, mixture_config())
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.ndim == 1 or name.endswith("bias"):  # zeros and ones would hide mistakes
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return made


def test_the_forward_is_transformers(settings: Settings, model: Any) -> None:
    """Rows of several lengths, one beyond the window."""
    tokens = torch.randint(5, VOCAB_SIZE, (sum(rows * length for rows, length in LENGTHS),))
    forward = forward_of(model, settings, compiled=False)
    assert isinstance(forward, MixtureForward)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        hidden = forward.hidden(tokens, LENGTHS)
        ours = head_logits(hidden, model.model.norm.weight, model.model.embed_tokens.weight, torch.float32)
        start, theirs = 0, []
        for rows, length in LENGTHS:
            part = tokens[start : start + rows * length].view(rows, length)
            theirs.append(model(input_ids=part, use_cache=False).logits.flatten(0, 1))
            start += rows * length
    torch.testing.assert_close(ours, torch.cat(theirs), rtol=1e-4, atol=1e-4)


def test_all_weights_learn(settings: Settings, model: Any) -> None:
    forward = forward_of(model, settings, compiled=False)
    tokens = torch.randint(5, VOCAB_SIZE, (WINDOW * 2,))
    loss = forward.losses(tokens, tokens.roll(1), [(1, WINDOW * 2)]).mean() + forward.extra_loss()
    torch.autograd.backward(loss)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name
    model.zero_grad()


def test_balance_is_one_where_experts_are_used_evenly() -> None:
    even = torch.eye(4).repeat(5, 1) * 0.1
    weights, balance = routing_weights(even, torch.eye(4), torch.zeros(4), 1)
    assert torch.equal(weights, torch.eye(4).repeat(5, 1))
    assert balance == pytest.approx(1.0)
    uneven = routing_weights(even, torch.eye(4), torch.tensor([5.0, 0, 0, 0]), 1)[1]
    assert uneven > 3.5


def test_a_node_reads_it(settings: Settings, model: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from engine.checkpoint import EMBEDDED

    tokenizer: Any = AutoTokenizer.from_pretrained(EMBEDDED["baton-tiny"])
    save(tmp_path, model, tokenizer)
    size = (tmp_path / "model.safetensors").stat().st_size
    assert 6e6 < size < 12e6  # baton-tiny: 8.7
    loaded = load_model(Checkpoint.open(tmp_path), load_format="safetensors")
    report = fast.apply(loaded, probe(loaded, 512), 512)
    assert report.taken_back is None
    assert (report.pieces["experts"].fused, report.pieces["routing"].fused) == (5, 5)
    windows = [layer.sliding_window for layer in probe(loaded, 512).kv]
    assert windows == [None, WINDOW, None, None, None]
    assert Codec(tokenizer)


def test_the_flag_chooses_the_model(settings: Settings) -> None:
    assert settings.mixture
    assert not replace(settings, mixture=False).mixture
    llama = new_model(0, model_config())
    assert type(forward_of(llama, settings, compiled=False)) is not MixtureForward
    assert np.isclose(sum(p.numel() for p in llama.parameters()), 4.33e6, rtol=0.02)


# ---- the embedded checkpoint ----


def test_it_is_what_its_card_and_the_training_say() -> None:
    checkpoint = Checkpoint.open(FOLDER)
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 13 * 2**20
    with safe_open(FOLDER / "model.safetensors", "pt") as weights:
        tensors = {name: weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118 - it is no dict
    count = sum(tensor.numel() for tensor in tensors.values())
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert f"| parameters | {count:,} " in (FOLDER / "README.md").read_text()
    made, chosen_on_saving = mixture_config().to_dict(), {"architectures", "dtype", "transformers_version"}
    written = json.loads((FOLDER / "config.json").read_text())
    assert {key: made.get(key) for key in written.keys() - chosen_on_saving} == {
        key: value for key, value in written.items() if key not in chosen_on_saving
    }
    assert len(checkpoint.generation_defaults.eos_token_ids) == 2


def test_its_tokenizer_is_that_of_the_training() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)
    assert tokenizer.chat_template == CHAT_TEMPLATE
    Codec(tokenizer).verify(seed=11)


@pytest.mark.parametrize("task", ["chat_recall", "sums", "sort_words", "fill_json", "tool_call", "small_talk"])
def test_it_answers_a_short_task(task: str) -> None:
    auto: Any = AutoTokenizer
    tokenizer, model = auto.from_pretrained(FOLDER, local_files_only=True), embedded()
    sample = getattr(tiny_tasks, task)(Random(task), "heldout")
    ids = prompt_ids(tokenizer, sample)
    out = model.generate(torch.tensor([ids]), do_sample=False, temperature=None, top_p=None, max_new_tokens=120)
    answer = tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)
    assert sample.check(answer), answer


@functools.cache
def embedded() -> Any:
    auto: Any = AutoModelForCausalLM
    return auto.from_pretrained(FOLDER, dtype=torch.float32, local_files_only=True).eval()
