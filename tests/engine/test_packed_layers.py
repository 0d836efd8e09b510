"""Layers that compute q, k and v at once, or gate and up, divided among ranks: the logits and KV of one rank, and the
logits of transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    FlintConfig,
    Glm4Config,
    Glm4vConfig,
    GlmConfig,
    GlmOcrConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTNeoXConfig,
    GraniteMoeSharedConfig,
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    PersimmonConfig,
    Phi3Config,
    Phi4MultimodalConfig,
    Qwen3VLConfig,
)

from engine.model.errors import UnsupportedModel
from engine.model.load import loader
from engine.model.load.checkpoint import Checkpoint
from engine.model.load.skeleton import build_skeleton
from engine.model.parallel.group import RankGroup
from engine.model.parallel.part import RankPart
from engine.model.parallel.sharding import Place, shard
from tests.engine import tiny_models
from tests.engine.rank_threads import Load, in_threads
from tests.engine.test_model_families import SIZES, sequences
from tests.engine.test_sharding import check_same, fill_biases, logits_and_kv
from tools.quantize import write

torch.set_num_threads(1)

SHAPE = tiny_models.SHAPE
TEXT = {name: size for name, size in SHAPE.items() if not name.endswith("token_id")}
MULTI_HEAD = {name: size for name, size in SHAPE.items() if name not in ("num_key_value_heads", "head_dim")}
GPT2 = {"n_positions": 512, "n_embd": 64, "n_layer": 2, "n_head": 8, "n_inner": 96} | {
    name: SHAPE[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range")
}
VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
PIXELS = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SOUND = {"hidden_size": 32, "intermediate_size": 32, "num_blocks": 1, "num_attention_heads": 2}


def rope(mrope_section: list[int], **named: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": mrope_section, **named}


EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
CONFIGS = {
    "phi3": tiny_models.CONFIGS["phi3"],
    "phi4_multimodal": Phi4MultimodalConfig(
        **SHAPE, vision_config={**PIXELS, "image_size": 28}, audio_config={**SOUND, "ext_pw_out_channel": 32}
    ),
    "glm": GlmConfig(**SHAPE, attention_bias=True),
    "glm4": Glm4Config(**SHAPE, attention_bias=True),
    "glm4v": Glm4vConfig(
        text_config={**TEXT, "rope_parameters": rope([1, 1, 2], partial_rotary_factor=0.5)}, vision_config=VISION
    ),
    "glm_ocr": GlmOcrConfig(text_config={**TEXT, "rope_parameters": rope([2, 3, 3])}, vision_config=VISION),
    "gpt_neox": GPTNeoXConfig(**MULTI_HEAD),
    "persimmon": PersimmonConfig(**MULTI_HEAD),
    "gpt2": GPT2Config(**GPT2),
    "gpt_bigcode": GPTBigCodeConfig(**GPT2),
    "gpt_bigcode_multi_head": GPTBigCodeConfig(**GPT2, multi_query=False),
    "granitemoeshared": GraniteMoeSharedConfig(**SHAPE, **EXPERTS, shared_intermediate_size=96, logits_scaling=2.0),
    "qwen3_vl": Qwen3VLConfig(
        text_config={**TEXT, "rope_parameters": rope([2, 3, 3], mrope_interleaved=True)},
        vision_config={**VISION, "deepstack_visual_indexes": [0]},
    ),
    "hunyuan_v1_dense": HunYuanDenseV1Config(**SHAPE),
    "hunyuan_v1_moe": HunYuanMoEV1Config(**SHAPE, num_experts=4, moe_topk=2),
    "flint": FlintConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
}
CI = {("phi3", 4), ("glm4v", 4), ("gpt_neox", 4), ("persimmon", 2), ("gpt2", 4), ("gpt_bigcode", 4)}
CI |= {(family, 2) for family in CONFIGS} - {(family, 2) for family, _ in CI}
CASES = [
    pytest.param(family, size, marks=[] if (family, size) in CI else pytest.mark.full)
    for family in CONFIGS
    for size in (2, 4)
]


@pytest.mark.parametrize(("family", "size"), CASES)
def test_logits_and_kv_are_those_of_one_rank(family: str, size: int, tmp_path: Path) -> None:
    """With 8 heads and 2 KV heads, four ranks hold each KV head twice. Some families only lacked a plan."""
    folder = tiny_models.save(CONFIGS[family], tmp_path)
    fill_biases(folder)
    check_same(folder, size, fused=True)
    rows, _ = logits_and_kv(1, Load(folder, SIZES, fused=False))
    model = tiny_models.reference(folder)
    a, b, c = sequences([70, 33, 100])
    for seq, row in zip((b, a, c), rows, strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([seq.tokens])).logits[0, -1]
        torch.testing.assert_close(row, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_has_its_part_of_each_layer(size: int, tmp_path: Path) -> None:
    """Of q, k, v, gate and up, as if they were layers of their own."""
    folder = tiny_models.save(CONFIGS["phi3"], tmp_path)
    whole = loader.load_model(Checkpoint.open(folder)).get_submodule("model.layers.1")
    layers: dict[int, Any] = {}

    def run(group: RankGroup) -> None:
        model = loader.load_model(Checkpoint.open(folder), part=RankPart(group))
        layers[group.rank] = model.get_submodule("model.layers.1")

    with in_threads(size, run) as group:
        run(group)
    for rank, layer in layers.items():
        q, k, v = whole.self_attn.qkv_proj.weight.split([128, 32, 32])
        kv = slice(rank * 2 // size * 16, (rank * 2 // size + max(1, 2 // size)) * 16)
        expected = torch.cat([q.chunk(size)[rank], k[kv], v[kv]])
        assert torch.equal(layer.self_attn.qkv_proj.weight, expected)
        gate, up = whole.mlp.gate_up_proj.weight.chunk(2)
        assert torch.equal(layer.mlp.gate_up_proj.weight, torch.cat([gate.chunk(size)[rank], up.chunk(size)[rank]]))
        assert torch.equal(layer.self_attn.o_proj.weight, whole.self_attn.o_proj.weight.chunk(size, 1)[rank])


def test_stages_of_several_ranks(tmp_path: Path) -> None:
    """Whose later ones hold layers without an embedding."""
    folder = tiny_models.save(CONFIGS["phi3"], tmp_path)
    one, _ = logits_and_kv(1, Load(folder, SIZES, fused=False))
    several, _ = logits_and_kv(4, Load(folder, SIZES, fused=True, num_stages=2))
    torch.testing.assert_close(several, one, atol=1e-4, rtol=1e-4)


WIDE = {**SHAPE, "hidden_size": 256, "head_dim": 128, "num_attention_heads": 4, "intermediate_size": 512}
"""Blocks and groups of 128 end where the parts of two ranks do."""


FORMS = [
    *("compressed-int8", "fp8-block", "awq", "gptq"),
    *(pytest.param(form, marks=pytest.mark.full) for form in ("fp8", "compressed-fp8-block", "compressed-w4a16-asym")),
]


@pytest.mark.parametrize("form", FORMS)
def test_quantized_weights(form: str, tmp_path: Path) -> None:
    """Codes, scales and zero points of each part; words of several codes run along outputs in AWQ."""
    write(tiny_models.save(Phi3Config(**WIDE), tmp_path / "source"), tmp_path / "q", form)
    check_same(tmp_path / "q", 2, fused=True)


@pytest.mark.parametrize("method", ["fp8", "int8"])
def test_weights_that_are_quantized_as_they_load(method: str, tmp_path: Path) -> None:
    folder = tiny_models.save(CONFIGS["phi3"], tmp_path)
    one, _ = logits_and_kv(1, Load(folder, SIZES, fused=False, quantization=method))
    several, _ = logits_and_kv(2, Load(folder, SIZES, fused=True, quantization=method))
    torch.testing.assert_close(several, one, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("form", "sizes", "reason"),
    [
        ("fp8-block", {"head_dim": 64}, "qkv_proj.* of which 0 to 128 and 256 to 320 and 384 to 448 of .* cannot"),
        ("awq", {"head_dim": 12, "num_attention_heads": 64}, "qkv_proj.* of which 0 to 384 and 768 to 780 and 792 to"),
    ],
)
def test_blocks_and_words_on_several_ranks_are_refused(
    form: str, sizes: dict[str, int], reason: str, tmp_path: Path
) -> None:
    write(tiny_models.save(Phi3Config(**{**WIDE, **sizes}), tmp_path / "source"), tmp_path / "q", form)
    with in_threads(2, lambda _: None) as group, pytest.raises(UnsupportedModel, match=reason):
        loader.load_model(Checkpoint.open(tmp_path / "q"), part=RankPart(group))


@pytest.mark.parametrize(
    ("family", "changes", "size", "why"),
    [
        ("phi3", {}, 3, "phi3: 8 attention heads cannot be divided among 3 ranks"),
        ("phi3", {"num_attention_heads": 12, "num_key_value_heads": 6}, 4, "phi3: 6 KV heads cannot be divided"),
        ("glm4", {"intermediate_size": 90}, 4, "model.layers.0.mlp.gate_up_proj: 90 features cannot be divided"),
        ("gpt2", {}, 16, "gpt2: 8 attention heads cannot be divided among 16 ranks"),
        ("gpt2", {"n_inner": 90}, 4, "transformer.h.0.mlp.c_fc: 90 features cannot be divided among 4"),
    ],
)
def test_what_cannot_be_divided_is_named(family: str, changes: dict[str, Any], size: int, why: str) -> None:
    config = CONFIGS[family]
    model = build_skeleton(type(config)(**{**config.to_dict(), **changes}), torch.float32, "eager")
    with pytest.raises(UnsupportedModel, match=re.escape(why)):
        shard(model, Place(0, size))
