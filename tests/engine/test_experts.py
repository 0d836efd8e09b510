"""Experts in 8 bits, and padding, of which no expert is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import Qwen3MoeConfig

from baton_kernels.experts import reference
from benchmarks.accuracy.random_models import MAX_MODEL_LEN, make
from engine.model import fast
from engine.model.attention import IMPLEMENTATION, attach, row_slot_mapping_of
from engine.model.experts import NAMES, _store_by_rows, expert_modules, forward_of, own_forward, weights_of, why_not
from engine.model.fast import registry
from engine.model.fast.forwards import logits_as_served
from engine.model.fast.target import Target
from engine.model.kv_pool import KvPool
from engine.model.load.checkpoint import Checkpoint
from engine.model.load.loader import load_model
from engine.model.probe import probe
from engine.model.quantization.expert_weights import quantize_fp8
from tests.engine import tiny_models

torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("family", "load_format"),
    [("gpt_oss", "safetensors"), ("gpt_oss", "dummy"), ("qwen3_moe", "auto"), ("qwen3_moe", "dummy")],
)
def test_experts_are_quantized_while_they_load(family: str, load_format: Any, tmp_path: Path) -> None:
    """On a CPU to what 8 bits stand for; an expert's outputs are scaled one by one, however they are stored."""
    config = {**tiny_models.CONFIGS, **tiny_models.MIXTURES}[family]
    checkpoint = Checkpoint.open(tiny_models.save(config, tmp_path))
    plain, quantized = (load_model(checkpoint, load_format=load_format, quantization=q) for q in (None, "fp8"))
    modules = expert_modules(plain)
    assert len(modules) == 2
    for name, module in modules:
        own, other = weights_of(module), weights_of(quantized.get_submodule(name))
        assert own is not None
        assert other is not None
        for before, after in ((own.gate_up, other.gate_up), (own.down, other.down)):
            scale = before.abs().amax(-1, keepdim=True) / 448
            codes = after / scale
            torch.testing.assert_close(codes.to(torch.float8_e4m3fn).float(), codes, rtol=1e-5, atol=1e-4)
            assert 0.001 < (after - before).norm() / before.norm() < 0.04


def test_quantizing_twice_changes_nothing() -> None:
    model: Any = make("qwen3 moe", torch.float32, torch.device("cpu"), IMPLEMENTATION)
    module: Any = expert_modules(model)[0][1]
    assert quantize_fp8(module)
    once = module.gate_up_proj.clone()
    assert quantize_fp8(module)
    assert torch.equal(module.gate_up_proj, once)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("has_gate", False, "not gated MLPs"),
        ("has_post_expert_norm", True, "not gated MLPs"),
        ("_is_expert_parallel", True, "spread over devices"),
        ("_apply_gate", torch.relu, "its gate is none of silu"),
    ],
)
def test_experts_of_other_forms_stay_as_they_are(name: str, value: Any, why: str) -> None:
    model: Any = make("mixtral", torch.float32, torch.device("cpu"), IMPLEMENTATION)
    module: Any = expert_modules(model)[0][1]
    setattr(module, name, value)
    before = module.gate_up_proj.clone()
    assert why in str(why_not(module))
    assert not quantize_fp8(module)
    assert torch.equal(module.gate_up_proj, before)


@pytest.mark.parametrize(("size", "dtype"), [(36, "bfloat16"), (34, "float32")])
def test_experts_of_sizes_that_grouped_mm_does_not_take_are_served(size: int, dtype: str, tmp_path: Path) -> None:
    """transformers' modules call torch's."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": size}  # all: no choice to round
    folder = tiny_models.save(Qwen3MoeConfig(**tiny_models.SHAPE, **sizes), tmp_path)
    model, exact = (load_model(Checkpoint.open(folder), chosen) for chosen in (dtype, "float32"))
    probed = probe(model)
    logits, expected = (
        logits_as_served(Target(one, probe(one).layers, MAX_MODEL_LEN), probe(one).kv) for one in (model, exact)
    )
    assert (logits - expected).norm() < 0.05 * expected.norm()
    assert fast.apply(model, probed, MAX_MODEL_LEN).pieces["experts"].fused == 2


def test_arguments_may_be_named() -> None:
    model: Any = make("gpt-oss", torch.float32, torch.device("cpu"), IMPLEMENTATION)
    module: Any = expert_modules(model)[0][1]
    of = weights_of(module)
    assert of is not None
    forward = forward_of(module, of)
    x, ids, weights = torch.randn(3, 128), torch.tensor([[0], [2], [1]]), torch.ones(3, 1)
    expected = own_forward(module)(module, x, router_indices=ids, routing_weights=weights)
    torch.testing.assert_close(forward(x, ids, weights), expected)
    torch.testing.assert_close(forward(x, router_indices=ids, routing_weights=weights), expected)
    torch.testing.assert_close(forward(hidden_states=x, router_indices=ids, routing_weights=weights), expected)


def test_padding_is_known_on_a_gpu_alone() -> None:
    layer = nn.Module()
    assert row_slot_mapping_of(layer, torch.zeros(3, 4)) is None
    model: Any = make("mixtral", torch.float32, torch.device("cpu"), IMPLEMENTATION)
    probed = probe(model, MAX_MODEL_LEN)
    (step,) = attach(probed.layers, KvPool(probed.kv, 3, 16, torch.device("cpu")))
    step.slot_mapping = torch.zeros(3, dtype=torch.int64)
    assert row_slot_mapping_of(probed.layers[0], torch.zeros(3, 4)) is None


@pytest.mark.gpu
@torch.inference_mode()
def test_padding_reads_no_expert() -> None:
    """The experts of tokens without a slot are not computed; a call with other rows than the step's computes all."""
    device = torch.device("cuda")
    model: Any = make("qwen3 moe", torch.bfloat16, device, IMPLEMENTATION)
    probed = probe(model, MAX_MODEL_LEN)
    assert fast.apply(model, probed, MAX_MODEL_LEN).pieces["experts"].fused == 2
    (step,) = attach(probed.layers, KvPool(probed.kv, 3, 16, device))
    step.row_slot_mapping = torch.tensor([17, 0, 18, 0], device=device)
    module: Any = expert_modules(model)[0][1]
    of = weights_of(module)
    assert of is not None
    x = torch.randn(4, 128, device=device, dtype=torch.bfloat16)
    ids, weights = torch.arange(8, device=device).view(4, 2), torch.rand(4, 2, device=device)
    of.gate_up[[2, 3, 6, 7]] = float("nan")
    out = module(x, ids, weights)
    assert out[[0, 2]].isfinite().all()
    assert not out[[1, 3]].any()
    assert module(x[:2], ids[:2], weights[:2])[1].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3 moe", "gpt-oss", "glm4 moe"])
def test_experts_in_8_bits_on_a_gpu(family: str) -> None:
    device = torch.device("cuda")
    plain, model = (make(family, torch.bfloat16, device, IMPLEMENTATION) for _ in range(2))
    for _, module in expert_modules(model):
        assert quantize_fp8(module)
        assert all(getattr(module, name).dtype == torch.float8_e4m3fn for name in NAMES)
    logits = []
    for one in (plain, model):
        probed = probe(one, MAX_MODEL_LEN)
        report = fast.apply(one, probed, MAX_MODEL_LEN)
        assert report.taken_back is None
        assert not report.pieces["experts"].refused
        with torch.inference_mode():
            logits.append(logits_as_served(Target(one, probed.layers, MAX_MODEL_LEN), probed.kv))
    error = (logits[1] - logits[0]).norm(dim=-1) / logits[0].norm(dim=-1)
    assert 0.001 < float(error.median()) < 0.2


@pytest.mark.gpu
@torch.inference_mode()
@pytest.mark.parametrize("family", ["qwen3 moe", "gpt-oss"])
def test_sums_in_norms_change_no_bit_on_a_gpu(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device, logits = torch.device("cuda"), []
    for in_norms in (True, False):
        if not in_norms:
            without = {name: piece for name, piece in registry.PIECES.items() if name != "expert_sum"}
            monkeypatch.setattr(registry, "PIECES", without)
        model = make(family, torch.bfloat16, device, IMPLEMENTATION)
        probed = probe(model, MAX_MODEL_LEN)
        report = fast.apply(model, probed, MAX_MODEL_LEN)
        assert (report.taken_back, "expert_sum 2/2" in str(report)) == (None, in_norms)
        logits.append(logits_as_served(Target(model, probed.layers, MAX_MODEL_LEN), probed.kv))
    assert torch.equal(*logits)


@pytest.mark.parametrize("made_in", [True, False])
@pytest.mark.parametrize("stored_in", [True, False])
def test_parameters_are_stored_anew_in_and_out_of_inference_mode(made_in: bool, stored_in: bool) -> None:
    values = torch.randn(2, 4, 6)
    with torch.inference_mode(made_in):
        parameter = nn.Parameter(values.clone(), requires_grad=False)
    with torch.inference_mode(stored_in):
        _store_by_rows(parameter)
        assert torch.equal(parameter.detach(), values)
    assert parameter.stride(1) == 1
    torch.testing.assert_close(F.linear(values[0], parameter[0]), F.linear(values[0], values[0]))


@pytest.mark.gpu
@torch.inference_mode()
def test_weights_stored_by_columns_become_rows() -> None:
    """gpt-oss: the parameters keep their shapes and values, as views."""
    model: Any = make("gpt-oss", torch.bfloat16, torch.device("cuda"), IMPLEMENTATION)
    module: Any = expert_modules(model)[0][1]
    before = {name: parameter.clone() for name, parameter in module.named_parameters()}
    of = weights_of(module)
    assert of is not None
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, before[name])
    assert of.gate_up.is_contiguous()
    assert of.gate_up.data_ptr() == module.gate_up_proj.data_ptr()
    x, ids = torch.randn(3, 128, device="cuda", dtype=torch.bfloat16), torch.arange(3, device="cuda")[:, None]
    weights = torch.ones(3, 1, device="cuda")
    expected = module(x, ids, weights)
    torch.testing.assert_close(reference.experts(x, ids, weights, of), expected, rtol=2e-2, atol=2e-2)
