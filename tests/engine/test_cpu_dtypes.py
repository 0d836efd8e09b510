"""bf16 and int8 on a CPU: what is loaded, which layouts weights get, and answers through the engine."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, LongcatFlashConfig

from baton_kernels.packed_linear import can_pack_int4, can_pack_int8
from benchmarks.engine.cpu.baton_side import EngineRunner
from engine.checkpoint import EMBEDDED
from engine.model import fast
from engine.model.fast import packing
from engine.model.fast.forwards import logits_as_served
from engine.model.fast.target import Target
from engine.model.linear_method import UnquantizedLinear, method_of
from engine.model.load import loader
from engine.model.load.checkpoint import Checkpoint
from engine.model.probe import Probe, probe
from engine.model.quantization.linear import LinearOfFourBits, QuantizedLinear
from tests.engine import tiny_models
from tools.quantize import write
from tools.tiny.training.evaluate import heldout, prompt_ids

torch.set_num_threads(1)

TINY = Checkpoint.open(EMBEDDED["baton-tiny"])
NUM_PRODUCTS = 5 * 4 + 1
needs_int8 = pytest.mark.skipif(not can_pack_int8(), reason="this processor does not multiply 8 bits")


def load(dtype: str, quantization: str | None = None) -> tuple[Any, Probe]:
    model = loader.load_model(TINY, dtype, quantization=quantization)
    return model, probe(model, 128)


@torch.inference_mode()
def logits(model: Any, probed: Probe) -> torch.Tensor:
    return logits_as_served(Target(model, probed.layers, 128), probed.kv)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).mean())


@pytest.fixture(scope="module")
def exact() -> torch.Tensor:
    return logits(*load("float32"))


def test_small_models_in_fp32_keep_torchs_own_products(exact: torch.Tensor) -> None:
    model, probed = load("float32")
    report = fast.apply(model, probed, 128)
    assert report.num_packed == 0
    assert error(logits(model, probed), exact) < 1e-5


def test_larger_models_in_fp32_are_packed_and_as_exact(exact: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MIN_FP32_BYTES", 0)
    model, probed = load("float32")
    report = fast.apply(model, probed, 128)
    assert report.num_packed == NUM_PRODUCTS
    assert fast.packed_bytes(model) == report.packed_bytes > 0
    assert "packed 21" in str(report)
    assert error(logits(model, probed), exact) < 1e-5


def test_bf16_is_packed_and_each_weight_is_there_once(exact: torch.Tensor) -> None:
    model, probed = load("bfloat16")
    report = fast.apply(model, probed, 128)
    assert model.dtype == torch.bfloat16
    assert {layer.dtype for layer in probed.kv} == {"bfloat16"}
    assert report.num_packed == NUM_PRODUCTS
    assert error(logits(model, probed), exact) < 0.03
    left = {name for name, p in model.named_parameters() if p.ndim == 2 and p.numel()}
    assert left == {"model.embed_tokens.weight"}  # which also makes the logits, and is packed besides


def test_weights_with_inputs_as_rows_are_packed(tmp_path: Path) -> None:
    """Of GPT-2."""
    config = GPT2Config(vocab_size=160, n_positions=128, n_embd=64, n_layer=2, n_head=8)
    model = loader.load_model(Checkpoint.open(tiny_models.save(config, tmp_path)), "bfloat16")
    probed = probe(model, 128)
    expected = logits(model, probed)
    assert fast.apply(model, probed, 128).num_packed == 2 * 4 + 1
    assert error(logits(model, probed), expected) < 0.01
    left = {name for name, p in model.named_parameters() if p.ndim == 2 and p.numel()}
    assert left == {"transformer.wte.weight", "transformer.wpe.weight"}


def test_a_weight_that_another_module_reads_stays(tmp_path: Path) -> None:
    """LongCat-Flash's routers multiply by a weight of a layer that they do not call."""
    attention = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
    experts = {"moe_topk": 2, "n_routed_experts": 4, "zero_expert_num": 2, "expert_ffn_hidden_size": 32}
    sizes = {"hidden_size": 64, "ffn_hidden_size": 96, "num_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    tokens = {"vocab_size": 160, "bos_token_id": 0, "eos_token_id": 9}
    config = LongcatFlashConfig(**attention, **experts, **sizes, **tokens)
    model = loader.load_model(Checkpoint.open(tiny_models.save(config, tmp_path)), "bfloat16")
    probed = probe(model, 128)
    expected = logits(model, probed)
    report = fast.apply(model, probed, 128)
    routers = [name for name, _ in report.pieces["linear"].refused]
    assert routers == [f"model.layers.{index}.mlp.router.classifier" for index in (0, 1)]
    assert report.num_packed > 20
    assert error(logits(model, probed), expected) < 0.03


def test_layers_whose_joint_product_differs_are_packed_one_by_one(
    exact: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.model.fast.mlp.close", lambda *_: False)
    model, probed = load("bfloat16")
    assert fast.apply(model, probed, 128).num_packed == NUM_PRODUCTS + len(probed.layers)
    assert error(logits(model, probed), exact) < 0.03


def test_a_layout_whose_product_differs_is_not_used(exact: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.model.linear_method.packed_linear", lambda x, packed, bias: x.new_zeros(1))
    model, probed = load("bfloat16")
    assert fast.apply(model, probed, 128).num_packed == 0
    assert error(logits(model, probed), exact) < 0.03


@needs_int8
def test_8_bit_weights_stay_quantized_in_bf16(exact: torch.Tensor) -> None:
    model, probed = load("bfloat16", "int8")
    assert isinstance(method_of(model.get_submodule("model.layers.0.mlp.down_proj")), QuantizedLinear)
    assert isinstance(method_of(model.lm_head), QuantizedLinear)
    report = fast.apply(model, probed, 128)
    assert report.taken_back is None
    assert report.num_packed == NUM_PRODUCTS
    assert error(logits(model, probed), exact) < 0.1


@needs_int8
def test_8_bit_weights_in_fp32_are_computed_as_what_they_stand_for(exact: torch.Tensor) -> None:
    model, _ = load("float32", "int8")
    assert type(method_of(model.get_submodule("model.layers.0.mlp.down_proj"))) is UnquantizedLinear
    assert model.get_submodule("model.layers.0.mlp.down_proj").weight.dtype == torch.float32


@needs_int8
def test_other_formats_are_dequantized_in_bf16(exact: torch.Tensor) -> None:
    model, probed = load("bfloat16", "fp8")
    assert type(method_of(model.get_submodule("model.layers.0.mlp.down_proj"))) is UnquantizedLinear
    assert fast.apply(model, probed, 128).num_packed == NUM_PRODUCTS
    assert error(logits(model, probed), exact) < 0.1


@pytest.mark.parametrize("form", ["awq", "gptq", "compressed-w4a16-asym", "compressed-w4a16-channel"])
def test_4_bit_weights_multiply_few_rows_in_bf16(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of joined layers, too; more rows are multiplied by the values."""
    if not can_pack_int4(256, 128, torch.bfloat16):
        pytest.skip("this processor has no such product")
    write(EMBEDDED["baton-tiny"], tmp_path, form)
    targets = list[Target]()

    def noted(target: Target) -> list[int]:
        targets.append(target)
        return packing.pack_products(target)

    monkeypatch.setattr("engine.model.fast.registry.pack_products", noted)
    model = loader.load_model(Checkpoint.open(tmp_path), "bfloat16")
    probed = probe(model, 128)
    projection = model.get_submodule("model.layers.1.self_attn.o_proj")
    weight, x = projection.weight.detach().clone(), torch.randn(9, 256).bfloat16()
    assert fast.apply(model, probed, 128).num_packed == NUM_PRODUCTS
    packed = [product._packed for product in targets[0].products if isinstance(product, LinearOfFourBits)]
    few = [one for one in packed if one is not None and one.few is not None]
    assert len(few) == NUM_PRODUCTS - 1, "all but the one that makes logits"
    many, four = projection(x), projection(x[:4])
    assert error(many.float(), (x @ weight.T).float()) < 0.01
    assert error(four.float(), many[:4].float()) < 0.01
    assert not torch.equal(four, many[:4])


def test_a_cpu_has_no_float16() -> None:
    with pytest.raises(ValueError, match="--dtype: float16 is for GPUs"):
        loader.load_model(TINY, "float16")


@pytest.mark.parametrize("fast_here", [True, False])
def test_a_cpu_that_is_slow_in_bf16_is_warned_of(
    fast_here: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loader, "has_bfloat16", lambda: fast_here)
    with caplog.at_level(logging.WARNING):
        loader.load_model(TINY, "bfloat16")
    assert ("neither AVX512-BF16 nor AMX" in caplog.text) == (not fast_here)


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("int8", marks=needs_int8)])
def test_held_out_tasks_are_answered_through_the_engine(dtype: str) -> None:
    """Prompts of several lengths in one batch; in fp32 baton-tiny is right in 99 of 100."""
    tokenizer: Any = AutoTokenizer.from_pretrained(TINY.path)
    rows = ("sum of two numbers", "reverse a list", "call a tool", "fill a JSON object")
    samples = [sample for row in rows for sample in heldout(row, 4, seed=3)]
    prompts = [prompt_ids(tokenizer, sample) for sample in samples]
    longest = max(len(tokenizer.encode(sample.answer)) for sample in samples) + 2
    answers, _ = EngineRunner(dtype, TINY.path).generate(prompts, longest)
    ends = set(TINY.generation_defaults.eos_token_ids)
    right = 0
    for sample, tokens in zip(samples, answers, strict=True):
        length = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
        right += sample.check(tokenizer.decode(tokens[:length], skip_special_tokens=True))
    assert right >= len(samples) - 2
