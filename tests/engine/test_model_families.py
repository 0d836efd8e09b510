"""Logits of the runner, chunk by chunk over paged KV, against transformers' own forward; and what it must refuse."""

from __future__ import annotations

import copy
import dataclasses
import random
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import (
    BartConfig,
    BertConfig,
    DogeConfig,
    FalconConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    OpenAIGPTConfig,
    RobertaConfig,
    XGLMConfig,
)

from baton.layout import KvLayout, KvSlice, LayerKv
from baton.messages import AttemptId
from baton.sampling import SamplingParams
from engine.config import EngineConfig
from engine.model.attention import IMPLEMENTATION
from engine.model.batch import singles_first
from engine.model.errors import UnsupportedModel
from engine.model.kv_pool import require_served
from engine.model.load import loader
from engine.model.load.checkpoint import Checkpoint
from engine.model.probe import probe
from engine.model.runner import TorchModelRunner
from engine.sequence import Sequence
from engine.step import Chunk
from tests.engine import tiny_models

torch.set_num_threads(1)

SIZES = EngineConfig(num_blocks=65, max_model_len=512, vocab_size=tiny_models.VOCAB_SIZE, block_size=8)


class LogitsOf(TorchModelRunner):
    """Says the logits of each chunk that samples, decodes first, as the sampler gets them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(loader.load_model(Checkpoint.open(folder)), SIZES)
        self.pool.tensor[1:] = float("nan")  # whatever is read must have been written before

    @torch.inference_mode()
    def __call__(self, *chunks: Chunk) -> list[torch.Tensor]:
        ordered = singles_first(chunks)
        step = self._as_numbers(ordered, *self._input_batch.place(ordered), [])
        return list(self.rank.compute(step))


def sequences(lengths: list[int]) -> list[Sequence]:
    rng, order, result = random.Random(1), list(range(1, 65)), []
    rng.shuffle(order)
    for number, length in enumerate(lengths):
        tokens = tuple(rng.randrange(tiny_models.VOCAB_SIZE) for _ in range(length))
        seq = Sequence(AttemptId(1, str(number), 0), [0], tokens, SamplingParams(temperature=0.0))
        seq.block_table = [order.pop() for _ in range(-(-length // SIZES.block_size))]
        result.append(seq)
    return result


FAMILIES = {**tiny_models.CONFIGS, **tiny_models.MIXTURES, **tiny_models.WITH_IMAGES}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_the_modules_as_they_are(family: str, tmp_path: Path) -> None:
    folder = tiny_models.save(FAMILIES[family], tmp_path)
    run = LogitsOf(folder)
    a, b, c = seqs = sequences([70, 33, 100])
    assert run(Chunk.of(a, 0, 30), Chunk.of(b, 0, 32)) == []
    rows = run(Chunk.of(b, 32, 1), Chunk.of(a, 30, 40), Chunk.of(c, 0, 99)) + run(Chunk.of(c, 99, 1))
    model = tiny_models.reference(folder)
    for seq, row in zip((b, a, c), rows, strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([seq.tokens])).logits[0, -1]
        torch.testing.assert_close(row, expected, atol=2e-4, rtol=2e-4)
    assert len(seqs) == len(rows)


def test_two_runners_in_one_process_do_not_meet(tmp_path: Path) -> None:
    folder = tiny_models.save(tiny_models.CONFIGS["llama"], tmp_path)
    one, other = LogitsOf(folder), LogitsOf(folder)
    (seq,) = sequences([40])
    one(Chunk.of(seq, 0, 39))
    (alone,) = other(Chunk.of(seq, 0, 40))
    (chunked,) = one(Chunk.of(seq, 39, 1))
    torch.testing.assert_close(alone, chunked, atol=1e-5, rtol=1e-5)


def test_another_requests_nan_does_not_spread(tmp_path: Path) -> None:
    folder = tiny_models.save(tiny_models.CONFIGS["llama"], tmp_path)
    run = LogitsOf(folder)
    (seq,) = sequences([12])
    for start in range(12):
        rows = run(Chunk.of(seq, start, 1))
    assert bool(rows[0].isfinite().all())


def test_the_pool_and_its_layout(tmp_path: Path) -> None:
    folder = tiny_models.save(tiny_models.CONFIGS["llama"], tmp_path)
    pool = TorchModelRunner(loader.load_model(Checkpoint.open(folder)), SIZES).pool
    assert pool.tensor.shape == (65, 2, 2, 2, 8, 16)
    layout = KvLayout(pool.layers, pool.block_size, "print")
    assert layout.layers == (LayerKv(2, 16, 16, "float32"),) * 2
    assert (layout.block_size, layout.ranks) == (8, (KvSlice(0, 2, 0, 2),))
    raw = pool.as_bytes()
    assert raw.shape == (65, layout.block_bytes)
    assert layout.block_bytes == 2 * 2 * 2 * 8 * 16 * 4
    raw[3] = 255
    assert bool(pool.tensor[3].isnan().all())
    assert not bool(pool.tensor[[2, 4]].any())


SMALL = {key: tiny_models.SHAPE[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")}


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (MambaConfig(**SMALL, state_size=4), "linear_attention"),
        (FalconConfig(**SMALL, num_attention_heads=4), "attention functions of its own"),
        (Llama4TextConfig(**tiny_models.SHAPE, num_local_experts=2), "chunked_attention"),
        (
            LlamaConfig(
                **tiny_models.SHAPE, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
            ),
            "dynamic",
        ),
        (BertConfig(**SMALL, num_attention_heads=4, intermediate_size=96), "its tokens attend to later ones"),
        (
            BartConfig(vocab_size=160, d_model=64, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=96),
            "it does not take positions as they are given",
        ),
        (
            RobertaConfig(**SMALL, num_attention_heads=4, intermediate_size=96, is_decoder=True, initializer_range=0.3),
            "its positions do not begin at 0",
        ),
        (DogeConfig(**tiny_models.SHAPE), "layer 0 has a mask of its own"),
        (OpenAIGPTConfig(vocab_size=160, n_embd=64, n_layer=2, n_head=4), "attention functions of its own"),
        (
            XGLMConfig(vocab_size=160, d_model=64, ffn_dim=96, num_layers=2, attention_heads=4),
            "attention functions of its own",
        ),
        (
            Llama4TextConfig(**tiny_models.SHAPE, layer_types=["full_attention"] * 2, no_rope_layers=[1, 0]),
            "count themselves",
        ),
        (MistralConfig(**tiny_models.SHAPE, sliding_window=0), "layer 0 has a sliding window of 0 tokens"),
        (MistralConfig(**tiny_models.SHAPE, sliding_window=-1), "layer 0 has a sliding window of -1 tokens"),
        (LlamaConfig(**tiny_models.SHAPE, return_dict=False), "does not run on a flattened batch"),
    ],
    ids=[
        "recurrent state",
        "legacy attention",
        "chunked attention",
        "RoPE by batch",
        "encoder",
        "positions of its own",
        "positions after that of padding",
        "masks by tokens",
        "no attention calls",
        "masks of no shape of ours",
        "queries scaled by index",
        "empty window",
        "negative window",
        "tuples for outputs",
    ],
)
def test_models_that_would_be_wrong_are_refused(config, why: str, tmp_path: Path) -> None:
    folder = tiny_models.save(config, tmp_path)
    with pytest.raises(UnsupportedModel, match=why):
        probe(loader.load_model(Checkpoint.open(folder)))


def test_values_that_are_no_numbers_say_nothing_of_positions(tmp_path: Path) -> None:
    model = loader.load_model(Checkpoint.open(tiny_models.save(tiny_models.CONFIGS["llama"], tmp_path)))
    model.get_parameter("model.norm.weight").fill_(float("nan"))
    model.get_parameter("model.layers.1.input_layernorm.weight").fill_(float("inf"))
    assert len(probe(model).layers) == 2


def test_a_window_that_only_masks_have_is_the_layers(tmp_path: Path) -> None:
    """The masks' is what transformers' eager attention computes; see the logits of this family."""
    model = loader.load_model(Checkpoint.open(tiny_models.save(tiny_models.MIXTURES["qwen2_moe"], tmp_path)))
    assert [layer.sliding_window for layer in probe(model).kv] == [20, None]
    assert model.config._attn_implementation == IMPLEMENTATION


def test_two_windows_that_differ_are_refused_if_it_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loader.load_model(Checkpoint.open(tiny_models.save(tiny_models.CONFIGS["mistral"], tmp_path)))
    monkeypatch.setattr(model.config, "sliding_window", 30)  # of masks; attention modules took theirs before
    for layer in model.model.layers:
        monkeypatch.setattr(layer.self_attn, "config", copy.deepcopy(model.config))
        layer.self_attn.config.sliding_window = 20
    with pytest.raises(UnsupportedModel, match="two sliding windows: 30 in its mask, 20 in its attention"):
        probe(model)
    assert len(probe(model, max_model_len=20).kv) == 2


LAYER = LayerKv(2, 16, 16, "float32")


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (LayerKv(4, 16, 16, "float32"), "M: layers' KV differ in shape: [(2, 16, 'float32'), (4, 16, 'float32')]"),
        (LayerKv(2, 16, 16, "bfloat16"), "M: layers' KV differ in shape: [(2, 16, 'bfloat16'), (2, 16, 'float32')]"),
        (LayerKv(2, 24, 16, "float32"), "M: K and V of layer 1 differ in width: 24 and 16"),
        (LayerKv(1, 576, 0, "float32"), "M: K and V of layer 1 differ in width: 576 and 0"),
        (LayerKv(0, 0, 0, "float32", state_bytes=64), "M: layer 1 keeps a state of 64 bytes instead of KV"),
    ],
)
def test_kv_that_the_pool_cannot_keep_is_refused_by_what_it_is(layer: LayerKv, why: str) -> None:
    with pytest.raises(UnsupportedModel, match=re.escape(why)):
        require_served([LAYER, layer], "M")


def test_layers_may_differ_in_how_far_they_look_back() -> None:
    require_served([LAYER, dataclasses.replace(LAYER, sliding_window=4)], "M")


def test_the_probe_sees_what_each_layer_keeps(tmp_path: Path) -> None:
    model = loader.load_model(Checkpoint.open(tiny_models.save(tiny_models.CONFIGS["gemma2"], tmp_path)))
    assert model.config.layer_types == ["sliding_attention", "full_attention"]
    assert probe(model).kv == (LayerKv(2, 16, 16, "float32", 20), LayerKv(2, 16, 16, "float32"))


def test_a_layer_whose_attention_is_bypassed_is_refused(tmp_path: Path) -> None:
    folder = tiny_models.save(tiny_models.CONFIGS["llama"], tmp_path)
    model = loader.load_model(Checkpoint.open(folder))

    class Bypass(nn.Module):
        def forward(self, hidden_states: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
            return hidden_states, None

    model.model.layers[1].self_attn = Bypass()
    with pytest.raises(UnsupportedModel, match="1 modules called paged attention 1 times, for 2 layers"):
        probe(model)
