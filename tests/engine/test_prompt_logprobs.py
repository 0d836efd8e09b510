"""Logprobs of a prompt are those of the model, whatever the chunks, the cache and the batch; each is reported once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, OPTConfig

import baton.prompt_logprobs
from baton.messages import AttemptId
from baton.prompt_logprobs import PromptTokenLogprob
from baton.sampling import SamplingParams
from engine.config import EngineConfig
from engine.engine import Engine
from engine.model import prompt_logprobs
from engine.model.load import loader
from engine.model.load.checkpoint import Checkpoint
from engine.model.runner import TorchModelRunner
from engine.sequence import Sequence
from engine.step import StepResult
from tests.engine import counting, tiny_models

torch.set_num_threads(1)

PROMPT = tuple(torch.randint(0, tiny_models.VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(7)).tolist())
NUM_TOP = 3


@pytest.fixture(scope="module", params=["llama", "gemma2"])  # gemma2 caps its logits
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tiny_models.CONFIGS[request.param], tmp_path_factory.mktemp(request.param))


def make(folder: Path, **sizes: Any) -> Engine:
    plain: dict[str, Any] = {"num_blocks": 100, "max_model_len": 256, "block_size": 4, **sizes}
    config = EngineConfig(vocab_size=tiny_models.VOCAB_SIZE, eos_token_ids=(tiny_models.EOS,), **plain)
    return Engine(config, TorchModelRunner(loader.load_model(Checkpoint.open(folder), device="cpu"), config))


def ask(name: str, asks: int | None = NUM_TOP, samples: int = 1, **kwargs: Any) -> Sequence:
    sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    return Sequence(AttemptId(1, name, 0), list(range(samples)), PROMPT, sampling, num_prompt_logprobs=asks, **kwargs)


def told(results: list[StepResult], name: str) -> list[PromptTokenLogprob]:
    """The logprobs reported for a sequence, which must be of all tokens but the first, in order and before any
    token."""
    entries: list[PromptTokenLogprob] = []
    for result in results:
        for seq, piece in result.prompt_logprobs:
            if seq.attempt_id.request_id == name:
                assert piece.first_index == len(entries) + 1
                entries += piece
        if any(token.sequence.attempt_id.request_id == name for token in result.sampled):
            assert len(entries) == len(PROMPT) - 1
    return entries


def check(folder: Path, entries: list[PromptTokenLogprob], num_top: int = NUM_TOP) -> None:
    model: Any = tiny_models.reference(folder)
    with torch.inference_mode():
        logprobs = model(torch.tensor([PROMPT])).logits[0].float().log_softmax(-1)
    assert len(entries) == len(PROMPT) - 1
    for position, entry in enumerate(entries):
        row, token = logprobs[position], PROMPT[position + 1]
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-3)
        assert entry.rank == int((row >= row[token]).sum())
        values, ids = row.topk(num_top)
        assert [other for other, _ in entry.top] == ids.tolist()
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-3)


@pytest.mark.parametrize("chunk", [1, 7, 32, 64])
def test_they_are_the_models_own(folder: Path, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_logprobs, "MAX_ROWS", 16)  # slices within a chunk
    engine = make(folder, max_num_batched_tokens=chunk)
    engine.add(ask("a"))
    results = counting.run(engine)
    check(folder, told(results, "a"))
    assert len([token for result in results for token in result.sampled]) == 3


@pytest.mark.parametrize("asks", [50, tiny_models.VOCAB_SIZE, 10_000])
def test_many_for_each_token_are_told_in_more_pieces(folder: Path, asks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baton.prompt_logprobs, "MAX_PIECE_LOGPROBS", 200)
    engine = make(folder, max_num_batched_tokens=32)
    engine.add(ask("a", asks))
    results = counting.run(engine)
    num_top = min(asks, tiny_models.VOCAB_SIZE)
    check(folder, told(results, "a"), num_top)
    pieces = [piece for result in results for _, piece in result.prompt_logprobs]
    assert {piece.num_tokens for piece in pieces} <= {200 // (1 + num_top), 1, 2}
    assert {piece.num_top for piece in pieces} == {num_top}


@pytest.mark.parametrize("family", sorted(tiny_models.MIXTURES))
def test_those_of_mixtures(family: str, tmp_path: Path) -> None:
    """Whose classes read more of their decoder's output."""
    folder = tiny_models.save(tiny_models.MIXTURES[family], tmp_path)
    engine = make(folder, max_num_batched_tokens=32)
    engine.add(ask("a"))
    check(folder, told(counting.run(engine), "a"))


SMALL: dict[str, Any] = {"vocab_size": tiny_models.VOCAB_SIZE, "bos_token_id": 0, "eos_token_id": tiny_models.EOS}
OTHERS = {
    "gpt2": GPT2Config(**SMALL, n_embd=32, n_layer=2, n_head=2, n_positions=256, initializer_range=0.3),
    "opt": OPTConfig(
        **SMALL,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
        init_std=0.3,
    ),
}


@pytest.mark.parametrize("family", sorted(OTHERS))
def test_those_of_classes_with_outputs_or_decoders_of_their_own(family: str, tmp_path: Path) -> None:
    """GPT-2 reads cross attentions from its decoder's output. OPT's decoder is within its base model."""
    folder = tiny_models.save(OTHERS[family], tmp_path)
    engine = make(folder, max_num_batched_tokens=32)
    engine.add(ask("a"))
    check(folder, told(counting.run(engine), "a"))


def test_the_prefix_cache_is_not_read_and_others_are_not_disturbed(folder: Path) -> None:
    engine = make(folder, max_num_batched_tokens=40)
    first = ask("plain", None)
    engine.add(first)
    alone = counting.run(engine)
    assert told_tokens(alone, "plain")
    again, scored = ask("again", None), ask("scored")
    engine.add(scored)
    engine.add(again)
    results = counting.run(engine)
    assert again.num_cached_tokens > 0
    assert scored.num_cached_tokens == 0
    check(folder, told(results, "scored"))
    assert not [piece for result in results for seq, piece in result.prompt_logprobs if seq is again]
    assert told_tokens(results, "again") == told_tokens(results, "scored") == told_tokens(alone, "plain")


def told_tokens(results: list[StepResult], name: str) -> list[int]:
    return [t.token for result in results for t in result.sampled if t.sequence.attempt_id.request_id == name]


@pytest.mark.parametrize("hand_off", [False, True])
def test_several_samples_share_them(folder: Path, hand_off: bool) -> None:
    engine = make(folder, max_num_batched_tokens=32)
    engine.add(ask("a", samples=3, hand_off=hand_off))
    check(folder, told([engine.compute(engine.schedule(0.0)) for _ in range(8)], "a"))


def test_one_that_has_ended_reports_none() -> None:
    engine, _ = counting.make(async_scheduling=True)
    seq = counting.sequence(9)
    seq.num_prompt_logprobs = 0
    engine.add(seq)
    engine.compute(engine.schedule(0.0))
    engine.sequences.release(seq)
    assert not any(result.prompt_logprobs for result in counting.run(engine))


def test_a_preempted_sequence_reports_each_token_once() -> None:
    """Its prompt is computed again from the first token on, though the cache has it, until all are reported."""
    engine, _ = counting.make(num_blocks=17, max_num_batched_tokens=8, async_scheduling=True)
    old = counting.sequence(16, max_tokens=40, ignore_eos=True)
    young = counting.sequence(43, first=10, max_tokens=4, ignore_eos=True)
    young.num_prompt_logprobs = 0
    engine.add(old)
    engine.add(young)
    results = counting.run(engine)
    pieces = [piece for result in results for _, piece in result.prompt_logprobs]
    assert young.num_preemptions > 0
    assert [index for p in pieces for index in range(p.first_index, p.end_index)] == list(range(1, 43))
    assert [entry.logprob for piece in pieces for entry in piece] == [-float(token) for token in range(11, 53)]
