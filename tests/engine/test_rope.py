"""Tables of cos and sin against what transformers computes, and what --max-model-len decides about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from benchmarks.accuracy.random_models import FAMILIES
from engine.model import rope
from engine.model.attention import IMPLEMENTATION
from engine.model.errors import UnsupportedModel
from engine.model.load.checkpoint import Checkpoint
from engine.model.probe import probe

torch.set_num_threads(1)

LONG, SHORT = 128, 48  # FAMILIES' original lengths are 64
X = torch.empty(0)
NOT_ALONE = ("gpt2", "mistral3", "qwen2.5 vl", "qwen3 vl")
"""Families without a rotary module, or with another one for images."""
KINDS = ("gemma3", "gemma3n", "olmo3")
"""Families with a set of parameters for each type of layer."""


def rotary_of(family: str) -> tuple[nn.Module, Any]:
    config = FAMILIES[family]()
    model = AutoModelForCausalLM.from_config(config, attn_implementation=IMPLEMENTATION)
    (rotary,) = rope.rotary_modules(model)
    return rotary, config


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in NOT_ALONE])
def test_a_table_has_what_transformers_computes_for_the_longest_sequence(family: str) -> None:
    rotary, config = rotary_of(family)
    look_up = rope.table_forward(rotary, config, LONG, X)
    kinds = [(kind,) for kind in sorted(set(config.layer_types))] if family in KINDS else [()]
    positions = torch.tensor([[5, 0, 127, 63, 64]])
    for kind in kinds:
        whole = rotary(X, torch.arange(LONG)[None], *kind)
        for table, own in zip(look_up(X, positions, *kind), whole, strict=True):
            torch.testing.assert_close(table, own[:, positions[0]], atol=1e-6, rtol=0)


def test_several_positions_for_a_token_have_no_table() -> None:
    """Those of Qwen2.5-VL; with a table they would be looked up one by one."""
    rotary, config = rotary_of("llama dynamic ntk")
    look_up = rope.table_forward(rotary, config, SHORT, X)
    with pytest.raises(ValueError, match="several positions for each token"):
        look_up(X, torch.zeros(3, 1, 2, dtype=torch.int64))


@pytest.mark.parametrize("max_model_len", [SHORT, LONG])
@pytest.mark.parametrize("family", ["phi3 longrope", "llama dynamic ntk"])
def test_neighbours_change_nothing(family: str, max_model_len: int) -> None:
    rotary, config = rotary_of(family)
    look_up = rope.table_forward(rotary, config, max_model_len, X)
    alone, together = look_up(X, torch.tensor([[3]])), look_up(X, torch.tensor([[3, max_model_len - 1]]))
    expected = rotary(X, torch.tensor([[3, max_model_len - 1]]))
    for one, of_two, own in zip(alone, together, expected, strict=True):
        assert torch.equal(one[0, 0], of_two[0, 0])
        torch.testing.assert_close(one[0, 0], own[0, 0], atol=1e-6, rtol=0)


def test_long_and_short_factors_differ() -> None:
    tables = []
    for length in (SHORT, LONG):
        rotary, config = rotary_of("phi3 longrope")
        tables.append(rope.table_forward(rotary, config, length, X)(X, torch.tensor([[40]]))[0])
    short, long = tables
    assert not torch.allclose(short, long, atol=1e-3)


@pytest.mark.parametrize(
    ("family", "max_model_len", "variant"),
    [
        ("llama", LONG, ""),
        ("gemma3", LONG, ""),
        ("phi3 longrope", 65, "longrope long"),
        ("phi3 longrope", 64, "longrope short"),
        ("llama dynamic ntk", LONG, "dynamic 128"),
        ("llama dynamic ntk", SHORT, "dynamic 64"),
    ],
)
def test_variants(family: str, max_model_len: int, variant: str) -> None:
    assert rope.variant(FAMILIES[family](), max_model_len) == variant


def test_nodes_that_chose_other_frequencies_do_not_share_kv(tmp_path: Path) -> None:
    for family, same in (("phi3 longrope", False), ("llama", True)):
        FAMILIES[family]().save_pretrained(tmp_path / family)
        checkpoint = Checkpoint.open(tmp_path / family)
        prints = {checkpoint.fingerprint(dummy=True, max_model_len=length) for length in (SHORT, LONG)}
        assert (len(prints) == 1) is same


def test_dynamic_ntk_reaches_as_far_as_its_factor(tmp_path: Path) -> None:
    for family, length in (("llama dynamic ntk", 128), ("llama", 128), ("phi3 longrope", 128)):
        FAMILIES[family]().save_pretrained(tmp_path / family)
        assert Checkpoint.open(tmp_path / family).max_model_len == length


@pytest.mark.parametrize(
    ("stated", "scaling", "length"),
    [
        (64, {"factor": 4.0, "original_max_position_embeddings": 64}, 256),  # as Qwen2.5's card has it
        (80, {"factor": 4.0, "original_max_position_embeddings": 64}, 256),  # Qwen3: 40960, of 32768
        (256, {"factor": 4.0, "original_max_position_embeddings": 64}, 256),  # gpt-oss, DeepSeek
        (300, {"factor": 4.0, "original_max_position_embeddings": 64}, 300),
        (256, {"factor": None, "original_max_position_embeddings": 64}, 256),
        (64, {"factor": 4.0}, 256),
    ],
)
def test_yarn_reaches_as_far_as_its_factor(stated: int, scaling: dict[str, Any], length: int, tmp_path: Path) -> None:
    scaling = {"type": "yarn", **scaling}
    file = {"model_type": "llama", "max_position_embeddings": stated, "rope_theta": 1e4, "rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps(file))
    assert Checkpoint.open(tmp_path).max_model_len == length


def test_positions_past_the_last_are_no_error() -> None:
    rotary = LlamaRotaryEmbedding(config := LlamaConfig(hidden_size=64, num_attention_heads=4))
    look_up = rope.table_forward(rotary, config, 8, X)
    cos, _ = look_up(X, torch.tensor([[7, 8, 9]], dtype=torch.int32))
    assert torch.equal(cos[0, 0], cos[0, 1])


@pytest.mark.parametrize("family", ["llama", "llama dynamic ntk", "phi3 longrope"])
def test_a_long_table_is_made_in_pieces(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rotary, config = rotary_of(family)
    length = LONG if family != "llama" else 30
    expected = rotary(X, torch.arange(length)[None])
    monkeypatch.setattr(rope, "_CHUNK", 7)
    cos, sin = rope.table_forward(rotary, config, length, X)(X, torch.arange(length)[None])
    torch.testing.assert_close((cos, sin), expected, atol=1e-6, rtol=0)


def test_positions_beyond_the_first_piece_are_their_own() -> None:
    rotary = LlamaRotaryEmbedding(config := LlamaConfig(hidden_size=64, num_attention_heads=4))
    positions = torch.tensor([[0, 8191, 8192, 8193, 16384, 19999]])
    looked_up = rope.table_forward(rotary, config, 20_000, X)(X, positions)
    torch.testing.assert_close(looked_up, rotary(X, positions), atol=1e-6, rtol=0)


def test_without_a_length_such_a_model_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(FAMILIES["phi3 longrope"](), attn_implementation=IMPLEMENTATION)
    with pytest.raises(UnsupportedModel, match="longrope: a --max-model-len is needed"):
        probe(model)
    probe(model, LONG)
    (rotary,) = rope.rotary_modules(model)
    assert rope.is_table(rotary)
    probe(model, LONG)  # once is enough
