"""Quantized weights divided among ranks: each rank has its part of the values, with their scales, to the bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, Phi3Config

from engine.checkpoint import EMBEDDED
from engine.model.errors import UnsupportedModel
from engine.model.load import loader
from engine.model.load.checkpoint import Checkpoint
from engine.model.parallel.part import RankPart
from engine.model.quantization.stored import unpack_words
from tests.engine import tiny_models
from tests.engine.quantized_files import restate, write_own_sizes
from tests.engine.rank_threads import Load, in_threads
from tests.engine.test_model_families import SIZES
from tests.engine.test_sharding import check_parts, check_same, logits_and_kv
from tools.quantize import pack, write

torch.set_num_threads(1)


@pytest.mark.parametrize("form", ["compressed-int8", "compressed-fp8-tensor", "fp8", "fbgemm-fp8"])
def test_a_rank_has_its_part_of_quantized_weights(form: str, tmp_path: Path) -> None:
    """What they stand for, to the bit."""
    write(EMBEDDED["baton-tiny"], tmp_path / "q", form)
    check_parts(tmp_path / "q", 2, head_dim=32)


def test_rows_of_several_layers_have_their_scales(tmp_path: Path) -> None:
    """Of q, k and v, where four ranks hold each KV head twice; in one dimension, as some files have them."""
    heads = {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 2, "pad_token_id": 0}
    source = tiny_models.save(Phi3Config(**{**tiny_models.SHAPE, **heads}), tmp_path / "source")
    write(source, tmp_path / "q", "fbgemm-fp8")
    file = tmp_path / "q" / "model.safetensors"
    tensors = load_file(file)
    scales = {name: tensor.flatten() for name, tensor in tensors.items() if name.endswith("weight_scale")}
    save_file(tensors | scales, file, metadata={"format": "pt"})
    restate(tmp_path / "q", quant_method="fp8")
    check_same(tmp_path / "q", 4, fused=True)


@pytest.mark.parametrize("method", ["fp8", "int8"])
def test_ranks_share_the_scales_of_weights_that_are_quantized_as_they_load(method: str) -> None:
    check_parts(EMBEDDED["baton-tiny"], 4, head_dim=32, quantization=method)


WIDE = {**tiny_models.SHAPE, "hidden_size": 256, "head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
"""Blocks of 128 x 128 end where the parts of two ranks do."""


@pytest.mark.parametrize("form", ["fp8-block", "compressed-fp8-block"])
def test_a_rank_has_its_blocks(form: str, tmp_path: Path) -> None:
    source = tiny_models.save(LlamaConfig(**{**WIDE, "intermediate_size": 512}), tmp_path / "source")
    write(source, tmp_path / "q", form)
    check_parts(tmp_path / "q", 2, head_dim=128)


def test_ranks_whose_rows_are_of_one_block_share_its_scale(tmp_path: Path) -> None:
    sizes = {"head_dim": 64, "num_attention_heads": 8, "intermediate_size": 512}
    write(tiny_models.save(LlamaConfig(**{**WIDE, **sizes}), tmp_path / "source"), tmp_path / "q", "fp8-block")
    check_parts(tmp_path / "q", 2, head_dim=64)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"intermediate_size": 128}, "down_proj: .* do not divide its 64 columns"),
        ({"head_dim": 96, "num_attention_heads": 8, "num_key_value_heads": 4}, "k_proj: .* where its 192 rows on each"),
        ({"head_dim": 96, "num_attention_heads": 8, "num_key_value_heads": 2}, "k_proj: .* where its 96 rows on each"),
    ],
)
@pytest.mark.parametrize("form", ["fp8-block", "compressed-fp8-block"])
def test_blocks_on_several_ranks_are_refused(form: str, sizes: dict[str, int], reason: str, tmp_path: Path) -> None:
    source = tiny_models.save(LlamaConfig(**{**WIDE, "intermediate_size": 512, **sizes}), tmp_path / "source")
    write(source, tmp_path / "q", form)
    with in_threads(2, lambda _: None) as group, pytest.raises(UnsupportedModel, match=reason):
        loader.load_model(Checkpoint.open(tmp_path / "q"), part=RankPart(group))


@pytest.mark.parametrize("form", ["awq", pytest.param("compressed-int8", marks=pytest.mark.full)])
def test_layers_that_files_call_otherwise(form: str, tmp_path: Path) -> None:
    """Of a language model inside another, on the ranks of two stages."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 128, "num_attention_heads": 2}
    write(tiny_models.save(tiny_models.within_a_larger_model(sizes), tmp_path / "source"), tmp_path / "q", form)
    one, _ = logits_and_kv(1, Load(tmp_path / "q", SIZES, fused=False))
    several, _ = logits_and_kv(4, Load(tmp_path / "q", SIZES, fused=False, num_stages=2))
    torch.testing.assert_close(several, one, atol=1e-5, rtol=1e-5)


FOUR_BITS = ["compressed-w4a16", "compressed-w4a16-asym", "compressed-w4a16-channel", "awq", "gptq", "gptq-asym"]


@pytest.mark.parametrize("form", FOUR_BITS)
def test_a_rank_has_its_words_and_groups(form: str, tmp_path: Path) -> None:
    """In words of several codes, along inputs or outputs."""
    source = tiny_models.save(LlamaConfig(**{**WIDE, "intermediate_size": 512}), tmp_path / "source")
    write(source, tmp_path / "q", form)
    check_parts(tmp_path / "q", 2, head_dim=128)


IN_ANY_ORDER = ["gptq-desc-act", "gptq-8bit", "compressed-w4a16-actorder", "compressed-w4a16-asym-actorder"]


@pytest.mark.parametrize("form", IN_ANY_ORDER)
def test_a_group_may_have_columns_on_several_ranks(form: str, tmp_path: Path) -> None:
    """Other numbers of them on each. 96 columns of down on each of four are no whole groups either."""
    source = tiny_models.save(LlamaConfig(**{**WIDE, "intermediate_size": 384}), tmp_path / "source")
    write_in_any_order(source, tmp_path / "q", form)
    check_parts(tmp_path / "q", 2, head_dim=128)
    check_parts(tmp_path / "q", 4, head_dim=128)


@pytest.mark.parametrize("size", [2, 4])
def test_logits_of_ranks_that_share_groups(size: int, tmp_path: Path) -> None:
    source = tiny_models.save(LlamaConfig(**{**WIDE, "intermediate_size": 512}), tmp_path / "source")
    write(source, tmp_path / "q", "gptq-desc-act")
    check_same(tmp_path / "q", size, fused=True)


@pytest.mark.parametrize(
    ("form", "g_idx", "width"), [("gptq", None, 512), ("gptq", None, 384), ("compressed", -1, 512)]
)
def test_columns_that_are_in_order_although_they_need_not_be(
    form: str, g_idx: int | None, width: int, tmp_path: Path
) -> None:
    """GPTQ's `static_groups`, and compressed-tensors' g_idx that was never set; groups may be on two ranks."""
    source = tiny_models.save(LlamaConfig(**{**WIDE, "intermediate_size": width}), tmp_path / "source")
    if form == "gptq":
        write(source, tmp_path / "q", "gptq")
        restate(tmp_path / "q", desc_act=True)
    else:
        write_in_any_order(source, tmp_path / "q", "compressed-w4a16-actorder", g_idx)
    check_parts(tmp_path / "q", 2, head_dim=128)


def test_rules_that_put_some_layers_columns_in_any_order(tmp_path: Path) -> None:
    write_own_sizes(tmp_path)
    check_parts(tmp_path, 2, head_dim=32)


def test_columns_of_groups_that_the_files_do_not_have_are_refused(tmp_path: Path) -> None:
    source = tiny_models.save(LlamaConfig(**{**WIDE, "intermediate_size": 512}), tmp_path / "source")
    write(source, tmp_path / "q", "gptq-desc-act")
    file = tmp_path / "q" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.down_proj.g_idx"][:256] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    with in_threads(2, lambda _: None) as group, pytest.raises(UnsupportedModel, match="of more than 4 groups"):
        loader.load_model(Checkpoint.open(tmp_path / "q"), part=RankPart(group))


def write_in_any_order(source: Path, folder: Path, form: str, g_idx: int | None = None) -> None:
    """compressed-tensors with `actorder` is its format in order, with columns whose order is another afterwards.
    g_idx: the group of each column instead, which are then left in order."""
    plain = form.removesuffix("-actorder")
    write(source, folder, plain)
    if form == plain:
        return
    file, generator = folder / "model.safetensors", torch.Generator().manual_seed(0)
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("weight_packed")]:
        codes = unpack_words(tensors[name], 4, 1)
        order = torch.randperm(codes.shape[1], generator=generator)
        if g_idx is not None:
            order = order.sort().values
        group = codes.shape[1] // tensors[name.replace("packed", "scale")].shape[1]
        tensors[name] = pack(codes[:, order], 4, 1)
        tensors[name.replace("packed", "g_idx")] = (
            order // group if g_idx is None else order.new_full(order.shape, g_idx)
        ).int()
    save_file(tensors, file, metadata={"format": "pt"})
    groups = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"]
    groups["group_0"]["weights"]["actorder"] = "group"
    restate(folder, config_groups=groups)


@pytest.mark.parametrize("desc_act", [False, True])
def test_one_group_of_all_columns(desc_act: bool, tmp_path: Path) -> None:
    """Each rank has the scales of all, and columns in order, whatever the files say of their groups."""
    source = tiny_models.save(LlamaConfig(**{**WIDE, "intermediate_size": 512}), tmp_path / "source")
    write(source, tmp_path / "q", "gptq")
    file = tmp_path / "q" / "model.safetensors"
    weights = load_file(file)
    for name, tensor in weights.items():
        if name.endswith(("qzeros", "scales")):
            weights[name] = tensor[:1].contiguous()
        elif name.endswith("g_idx"):
            weights[name] = torch.arange(len(tensor), dtype=tensor.dtype)
    assert any(name.endswith("g_idx") for name in weights)
    save_file(weights, file, metadata={"format": "pt"})
    restate(tmp_path / "q", group_size=-1, desc_act=desc_act)
    check_parts(tmp_path / "q", 2, head_dim=128)


@pytest.mark.parametrize("form", ["compressed-w4a16", "awq"])
def test_random_words_of_ranks(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory that holds anything, as a GPU's."""

    def move_to_used_memory(model: nn.Module, _: torch.device) -> None:
        for tensor in model.state_dict(keep_vars=True).values():
            tensor.data = torch.full_like(tensor, 77)

    monkeypatch.setattr(loader, "move_empty", move_to_used_memory)
    source = tiny_models.save(LlamaConfig(**{**WIDE, "intermediate_size": 512}), tmp_path / "source")
    write(source, tmp_path / "q", form)
    (tmp_path / "q" / "model.safetensors").unlink()
    with in_threads(2, lambda _: None) as group:
        model = loader.load_model(Checkpoint.open(tmp_path / "q"), load_format="dummy", part=RankPart(group))
    weight = model.get_submodule("model.layers.0.mlp.down_proj").weight
    assert list(weight.shape) == [256, 256]
    assert 0.005 < weight.std() < 0.1


def test_biases_that_only_the_files_have(tmp_path: Path) -> None:
    """AutoGPTQ writes some for all layers. Those after a sum are added once."""
    source = tiny_models.save(LlamaConfig(**{**WIDE, "intermediate_size": 512}), tmp_path / "source")
    write(source, tmp_path / "q", "gptq")
    file = tmp_path / "q" / "model.safetensors"
    weights = load_file(file)
    torch.manual_seed(1)
    for name, words in list(weights.items()):
        if name.endswith("qweight"):
            weights[name.replace("qweight", "bias")] = torch.randn(words.shape[1]).half() * 0.1
    save_file(weights, file, metadata={"format": "pt"})
    check_same(tmp_path / "q", 2, fused=True)


@pytest.mark.parametrize(
    ("form", "sizes", "reason"),
    [
        ("awq", {"intermediate_size": 384}, "down_proj of 192 x 256 cannot have AWQ groups of 128"),
        ("gptq", {"intermediate_size": 384}, "down_proj of 192 x 256 cannot have GPTQ groups of 128"),
        ("compressed-w4a16", {"intermediate_size": 384}, "down_proj: groups of 128 do not divide its 192 columns"),
        ("awq", {"head_dim": 12, "num_attention_heads": 32}, "k_proj of 256 x 12 cannot have AWQ groups of 128"),
        ("gptq", {"head_dim": 12, "num_attention_heads": 32}, "k_proj of 256 x 12 cannot have GPTQ groups of 128"),
    ],
)
def test_words_and_groups_on_several_ranks_are_refused(
    form: str, sizes: dict[str, int], reason: str, tmp_path: Path
) -> None:
    source = tiny_models.save(LlamaConfig(**{**WIDE, "intermediate_size": 512, **sizes}), tmp_path / "source")
    write(source, tmp_path / "q", form)
    with in_threads(2, lambda _: None) as group, pytest.raises(UnsupportedModel, match=reason):
        loader.load_model(Checkpoint.open(tmp_path / "q"), part=RankPart(group))
