"""What an earlier request has left in a block, NaN too, changes nobody's answer."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from baton.kv_groups import group_layers
from baton.layout import KvLayout
from baton.messages import AttemptId
from baton.sampling import SamplingParams
from engine.config import EngineConfig
from engine.engine import Engine
from engine.model.load import loader
from engine.model.load.checkpoint import Checkpoint
from engine.model.probe import probe
from engine.model.runner import TorchModelRunner
from engine.sequence import Sequence
from tests.engine import tiny_models

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tiny_models.CONFIGS["llama"], tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tiny_models.CONFIGS["gemma2"], tmp_path_factory.mktemp("gemma2"))


def answers(folder: Path, lengths: list[int], left_behind: float) -> list[list[int]]:
    """Of prompts of these lengths, all in the same steps, in a pool whose blocks are full of `left_behind`."""
    model = loader.load_model(Checkpoint.open(folder), device="cpu")
    probed = probe(model)
    probed = dataclasses.replace(probed, groups=group_layers(probed.kv))
    config = EngineConfig(
        num_blocks=60,
        max_model_len=64,
        vocab_size=tiny_models.VOCAB_SIZE,
        block_size=4,
        max_num_batched_tokens=64,
        windows=KvLayout(probed.kv, 4, "", groups=probed.groups).windows,
    )
    runner = TorchModelRunner(model, config, probed)
    runner.pool.tensor.fill_(left_behind)
    engine = Engine(config, runner)
    params = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True)
    seqs = [
        Sequence(AttemptId(1, str(length), 0), [0], tuple(range(10, 10 + length)), params, arrived_s=float(i))
        for i, length in enumerate(lengths)
    ]
    for seq in seqs:
        engine.add(seq)
    said: dict[str, list[int]] = {seq.attempt_id.request_id: [] for seq in seqs}
    for _ in range(20):
        for token in engine.compute(engine.schedule(0.0)).sampled:
            said[token.sequence.attempt_id.request_id].append(token.token)
    assert all(len(tokens) == 7 for tokens in said.values())
    return list(said.values())


@pytest.mark.parametrize("lengths", [[3, 14], [4, 14], [5, 17], [8, 30]], ids=str)
def test_decodes_of_several_lengths_share_a_tile_with_what_was_left_behind(folder: Path, lengths: list[int]) -> None:
    """The shorter one's blocks begin to fill at every place of a step: with it, at its end, and in its midst."""
    assert answers(folder, lengths, float("nan")) == answers(folder, lengths, 0.0)


@pytest.mark.parametrize("lengths", [[3, 14], [22, 31], [24, 40]], ids=str)
def test_nor_does_what_is_behind_a_window(windowed: Path, lengths: list[int]) -> None:
    """Of 20 tokens; blocks that are given back hold something else before the request has ended."""
    assert answers(windowed, lengths, float("nan")) == answers(windowed, lengths, 0.0)
