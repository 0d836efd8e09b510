"""Another linear method is chosen at load and goes all of the way: weights, fused products, tolerance. So does an
adapter around one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks.accuracy.random_models import MAX_MODEL_LEN, make
from engine.checkpoint import EMBEDDED
from engine.model import fast, linear_method, quantization
from engine.model.attention import IMPLEMENTATION
from engine.model.errors import UnsupportedModel
from engine.model.fast.forwards import logits_as_served
from engine.model.fast.tally import FusedReport
from engine.model.fast.target import Target
from engine.model.linear_method import LinearMethod, Product, Quantization, UnquantizedLinear, attach, method_of
from engine.model.load import loader
from engine.model.load.checkpoint import Checkpoint
from engine.model.probe import probe
from engine.model.tolerance import Tolerance, close

torch.set_num_threads(1)

NUM_LAYERS = 5  # of baton-tiny


class Int8Linear(LinearMethod):
    """weight: int8, [out_features, in_features]; scale: [out_features], fp32. The fast product rounds x to 8 bits per
    token, too, which is far more than the order of sums can change."""

    own_tolerance: Tolerance | None = Tolerance(product=0.05, logits=0.1)

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        self.weight, self.scale = weight, scale
        self.out_features, self.in_features = weight.shape
        self.dtype = scale.dtype

    @property
    def tolerance(self) -> Tolerance:
        return self.own_tolerance or super().tolerance

    def reference(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.scale[:, None])

    def make_product(self) -> Product:
        weight, scale = self.weight, self.scale

        def product(x: Tensor) -> Tensor:
            x_scale = x.abs().amax(dim=-1, keepdim=True) / 127
            return F.linear((x / x_scale).round(), weight.to(x.dtype)) * (scale * x_scale)

        return product

    @classmethod
    def can_concatenate(cls, parts: Sequence[Int8Linear]) -> bool:
        return len({part.in_features for part in parts}) == 1

    @classmethod
    def concatenate(cls, parts: Sequence[Int8Linear]) -> Int8Linear:
        weight = linear_method.concatenate_tensors([part.weight for part in parts])
        return cls(weight, linear_method.concatenate_tensors([part.scale for part in parts]))


class Int8(Quantization):
    """All but `unquantized` layers, as `quantized` writes them."""

    kind: type[Int8Linear] = Int8Linear
    unquantized: tuple[str, ...] = ("lm_head",)

    def create_weights(self, name: str, module: nn.Linear) -> None:
        if name.endswith(self.unquantized):
            return
        empty = torch.empty(module.weight.shape, dtype=torch.int8)
        scale = torch.empty(module.out_features, dtype=module.weight.dtype)
        module.weight = nn.Parameter(empty, requires_grad=False)
        module.weight_scale = nn.Parameter(scale, requires_grad=False)

    def process_weights_after_loading(self, name: str, module: nn.Linear, dtype: torch.dtype) -> LinearMethod:
        if name.endswith(self.unquantized):
            return UnquantizedLinear(module.weight, module.bias)
        assert isinstance(module.weight_scale, Tensor)
        return self.kind(module.weight, module.weight_scale)


def quantized(folder: Path, unquantized: tuple[str, ...] = Int8.unquantized) -> Checkpoint:
    """baton-tiny with the weights of its linear layers in 8 bits."""
    shutil.copytree(EMBEDDED["baton-tiny"], folder, dirs_exist_ok=True)
    file = folder / "model.safetensors"
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(file).items():
        tensors[name] = tensor
        layer = name.removesuffix(".weight")
        if layer.endswith(("_proj", "lm_head")) and not layer.endswith(unquantized):
            scale = tensor.float().abs().amax(dim=1) / 127
            tensors[name] = (tensor.float() / scale[:, None]).round().to(torch.int8)
            tensors[f"{name}_scale"] = scale
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "int8"}
    (folder / "config.json").write_text(json.dumps(config))
    return Checkpoint.open(folder)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return quantized(tmp_path_factory.mktemp("int8"))


def fused(model: PreTrainedModel) -> tuple[Callable[[], Tensor], FusedReport]:
    """A way to compute logits of a few tokens, [num_tokens, vocab_size]; and what became one."""
    probed = probe(model, MAX_MODEL_LEN)
    report = fast.apply(model, probed, MAX_MODEL_LEN)

    @torch.inference_mode()
    def logits() -> Tensor:
        return logits_as_served(Target(model, probed.layers, MAX_MODEL_LEN), probed.kv)

    return logits, report


def error(actual: Tensor, expected: Tensor) -> float:
    """The median token's, as the check of the whole model has it."""
    return float(((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).median())


def test_a_quantization_is_chosen_at_load_and_fused(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setitem(quantization.QUANTIZATIONS, "int8", lambda stated, _: made.append(stated) or Int8())
    model = loader.load_model(checkpoint, load_format="safetensors")
    assert made == [{"quant_method": "int8"}]
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    assert attention.q_proj.weight.dtype == torch.int8
    logits, report = fused(model)
    assert report.taken_back is None
    pieces = {name: (tally.fused, tally.refused) for name, tally in report.pieces.items()}
    assert pieces["qkv"] == pieces["gate_up"] == (NUM_LAYERS, [])
    assert pieces["linear"] == (2 * NUM_LAYERS + 1, [])
    for parts in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
        for name in ("weight", "weight_scale"):
            assert len({getattr(part, name).untyped_storage().data_ptr() for part in parts}) == 1
    whole, _ = fused(loader.load_model(Checkpoint.find("baton-tiny")))
    assert 1e-3 < error(logits(), whole()) < Int8Linear.own_tolerance.logits


def test_without_a_tolerance_of_its_own_it_stays_with_its_reference(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Strict(Int8Linear):
        own_tolerance = None

    class Quantized(Int8):
        kind = Strict

    monkeypatch.setitem(quantization.QUANTIZATIONS, "int8", lambda *_: Quantized())
    model = loader.load_model(checkpoint)
    logits, report = fused(model)
    assert report.taken_back is None
    assert {why for _, why in report.pieces["qkv"].refused + report.pieces["gate_up"].refused} == {"differs"}
    assert report.pieces["qkv"].fused == report.pieces["gate_up"].fused == 0
    weights = load_file(checkpoint.path / "model.safetensors")
    own = loader.load_model(Checkpoint.find("baton-tiny"))
    for name, parameter in own.named_parameters():
        if f"{name}_scale" in weights:
            parameter.copy_(weights[name] * weights[f"{name}_scale"][:, None])
    expected, _ = fused(own)
    assert error(logits(), expected()) < 1e-4


def test_layers_that_differ_in_their_method_are_not_made_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class WithoutKeys(Int8):
        unquantized = ("lm_head", "k_proj")

    monkeypatch.setitem(quantization.QUANTIZATIONS, "int8", lambda *_: WithoutKeys())
    model = loader.load_model(quantized(tmp_path, WithoutKeys.unquantized), load_format="safetensors")
    logits, report = fused(model)
    assert report.pieces["qkv"].found == 0
    assert report.pieces["linear"].fused == 5 * NUM_LAYERS + 1
    whole, _ = fused(loader.load_model(Checkpoint.find("baton-tiny")))
    assert error(logits(), whole()) < Int8Linear.own_tolerance.logits


def test_a_quantization_that_is_not_known_is_left_to_transformers(checkpoint: Checkpoint) -> None:
    with pytest.raises(UnsupportedModel, match="its weights are quantized"):
        loader.load_model(checkpoint, load_format="safetensors")


# ---- around another ----


class Adapted(LinearMethod):
    """The product of `base`, and x @ a.T @ b.T. a: [rank, in_features], b: [out_features, rank]."""

    def __init__(self, base: LinearMethod, a: Tensor, b: Tensor) -> None:
        self.base, self.a, self.b = base, a, b
        self.in_features, self.out_features, self.dtype = base.in_features, base.out_features, base.dtype

    @property
    def tolerance(self) -> Tolerance:
        return self.base.tolerance

    def reference(self, x: Tensor) -> Tensor:
        return self.base.reference(x) + x @ self.a.T @ self.b.T

    def make_product(self) -> Product:
        base = self.base.make_product()
        return lambda x: base(x) + x @ self.a.T @ self.b.T

    @classmethod
    def can_concatenate(cls, parts: Sequence[Adapted]) -> bool:
        bases = [part.base for part in parts]
        return len({type(base) for base in bases}) == 1 and type(bases[0]).can_concatenate(bases)

    @classmethod
    def concatenate(cls, parts: Sequence[Adapted]) -> Adapted:
        base = linear_method.fuse(part.base for part in parts)
        return cls(base, torch.cat([part.a for part in parts]), torch.block_diag(*[part.b for part in parts]))


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3 longrope"])
def test_an_adapter_wraps_a_method(family: str) -> None:
    model = make(family, torch.float32, torch.device("cpu"), IMPLEMENTATION)
    merged = make(family, torch.float32, torch.device("cpu"), IMPLEMENTATION)
    generator = torch.Generator().manual_seed(1)
    for (name, module), other in zip(model.named_modules(), merged.modules(), strict=True):
        base = method_of(module)
        if base is not None and name != "lm_head":
            a, b = (
                torch.randn(shape, generator=generator) * 0.1
                for shape in ((4, base.in_features), (base.out_features, 4))
            )
            attach(module, Adapted(base, a, b))
            other.get_parameter("weight").add_(b @ a)
    logits, report = fused(model)
    expected, own = fused(merged)
    assert report.taken_back is None
    assert str(report) == str(own)
    assert error(logits(), expected()) < 1e-4


# ---- the unquantized one ----


def parts(sizes: Sequence[int], bias: bool = True, dtype: torch.dtype = torch.float32) -> list[UnquantizedLinear]:
    torch.manual_seed(len(sizes))
    return [UnquantizedLinear(torch.randn(n, 6).to(dtype), torch.randn(n).to(dtype) if bias else None) for n in sizes]


def test_outputs_keep_their_order() -> None:
    each, x = parts([3, 1, 5]), torch.randn(2, 6)
    expected = torch.cat([part.reference(x) for part in each], dim=-1)
    whole = linear_method.fuse(each)
    assert (whole.in_features, whole.out_features) == (6, 9)
    assert close(whole.reference(x), expected)
    assert close(whole.make_product()(x), expected)
    assert close(torch.cat([part.make_product()(x) for part in each], dim=-1), expected)


def test_what_can_be_one() -> None:
    can = UnquantizedLinear.can_concatenate
    assert can(parts([3, 4]))
    assert not can([*parts([3]), *parts([3], bias=False)])
    assert not can([*parts([3]), *parts([3], dtype=torch.bfloat16)])
    assert not can([*parts([3]), UnquantizedLinear(torch.zeros(3, 7), torch.zeros(3))])
