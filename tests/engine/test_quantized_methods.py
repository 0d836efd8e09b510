"""As on a GPU, where weights stay quantized: products of their codes, joined and in another order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from baton_kernels.packed_linear import can_pack_int4
from baton_kernels.quantized_linear import FourBitWeight, QuantizedWeight, arrange, dequantize, linear, pack_halves
from baton_kernels.quantized_linear.four_bits import has_order
from engine.model import fast
from engine.model.fast.forwards import logits_as_served
from engine.model.fast.target import Target
from engine.model.linear_method import method_of
from engine.model.load.checkpoint import Checkpoint
from engine.model.load.loader import load_model
from engine.model.probe import probe
from engine.model.quantization.groups import GroupedCodes
from engine.model.quantization.linear import LinearOfFourBits, QuantizedLinear, install
from engine.model.tolerance import close
from tests.engine.quantized_files import TINY, write_exponents, write_own_sizes
from tests.engine.rank_threads import in_threads
from tools.quantize import FORMATS, write

torch.set_num_threads(1)


def quantized_method(rows: int, columns: Tensor | None = None, group: int = 64) -> QuantizedLinear:
    scale, zero = torch.rand(rows, 256 // group) + 0.5, torch.randint(0, 16, (rows, 256 // group), dtype=torch.uint8)
    values = pack_halves(torch.randint(0, 16, (rows, 256)), 2 * group)
    return QuantizedLinear(QuantizedWeight(values, scale, zero, group), None, torch.float32, columns)


def test_methods_of_one_form_become_one_and_share_its_memory() -> None:
    torch.manual_seed(0)
    columns = torch.randperm(256)
    parts = [quantized_method(rows, columns) for rows in (64, 32)]
    x = torch.randn(3, 256)
    expected = torch.cat([part.reference(x) for part in parts], 1)
    assert QuantizedLinear.can_concatenate(parts)
    whole = QuantizedLinear.concatenate(parts)
    assert torch.allclose(whole.make_product()(x), expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(expected[:, :64], linear(x[:, columns], parts[0].weight))
    assert parts[1].weight.values.untyped_storage().data_ptr() == whole.weight.values.untyped_storage().data_ptr()
    assert not QuantizedLinear.can_concatenate([parts[0], quantized_method(64, columns.flip(0))])
    assert not QuantizedLinear.can_concatenate([parts[0], quantized_method(64)])
    assert not QuantizedLinear.can_concatenate([parts[0], quantized_method(64, columns, 128)])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_a_ranks_columns_of_groups_that_others_share(bits: int, asymmetric: bool) -> None:
    """Its numbers of them are no multiples of what kernels take, and for one group it has none."""
    torch.manual_seed(0)
    groups = torch.tensor([0] * 33 + [1] * 64 + [3] * 15)[torch.randperm(112)]
    codes, scale = torch.randint(0, 1 << bits, (64, 112), dtype=torch.uint8), torch.rand(64, 4) + 0.5
    zero = torch.randint(0, 1 << bits, scale.shape, dtype=torch.uint8) if asymmetric else None
    of_columns = (1 << (bits - 1)) if zero is None else zero.float()[:, groups]
    values = (codes.float() - of_columns) * scale[:, groups]
    stored = GroupedCodes(codes, scale, zero, 128, bits)
    with in_threads(2, lambda _: None) as ranks:
        sorted_codes, columns = stored.by_group("o_proj", groups, ranks)
    assert columns is not None
    weight = sorted_codes.quantized()
    assert weight.group == 32
    assert weight.in_features == 192  # runs of 64, 64 and 32, and one more for an even number
    method = QuantizedLinear(weight, None, torch.float32, columns)
    x = torch.randn(3, 112)
    torch.testing.assert_close(method.make_product()(x), x @ values.t(), rtol=1e-5, atol=1e-2)
    assert method.in_features == 112
    module = torch.nn.Linear(112, 64, bias=False)
    install(module, weight, torch.float32, columns)
    assert torch.equal(module.weight, values)


def four_bit_part(rows: int, asymmetric: bool = True) -> LinearOfFourBits:
    codes = quantized_method(rows, group=128).weight
    codes = codes if asymmetric else replace(codes, zero=None)
    return LinearOfFourBits(dequantize(codes, torch.bfloat16), None, codes)


def test_layers_of_4_bits_become_one_on_a_cpu_whatever_their_rows_and_zeros() -> None:
    """Few rows are multiplied by codes if all have one form, and together fill the blocks of the kernel."""
    torch.manual_seed(0)
    x, asymmetric = torch.randn(2, 256).bfloat16(), {"all": (True, True), "some": (True, False)}
    for rows, zeros, has_few in (((96, 32), "all", True), ((64, 32), "all", False), ((96, 32), "some", False)):
        parts = [four_bit_part(num, own) for num, own in zip(rows, asymmetric[zeros], strict=True)]
        expected = torch.cat([part.reference(x) for part in parts], 1)
        assert LinearOfFourBits.can_concatenate(parts)
        whole = LinearOfFourBits.concatenate(parts)
        product = whole.make_product()
        freed = whole.pack(x)
        assert close(product(x), expected, whole.tolerance)
        if freed and can_pack_int4(256, 128, torch.bfloat16):
            assert whole._packed is not None
            assert (whole._packed.few is not None) == has_few


@pytest.mark.parametrize("sorted_columns", [False, True])
def test_products_go_on_with_weights_in_another_order(sorted_columns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU that has a kernel for it; here the product is plain torch's."""
    monkeypatch.setattr("engine.model.quantization.linear.can_arrange", lambda weight, dtype: has_order(weight))
    torch.manual_seed(0)
    method = quantized_method(64, torch.randperm(256) if sorted_columns else None, group=128)
    weight = replace(method.weight, scale=method.weight.scale.half())
    method = QuantizedLinear(weight, torch.randn(64), torch.float32, method.columns)
    x, product = torch.randn(3, 256), method.make_product()
    expected = product(x)
    freed = method.pack(x)
    assert [tensor.data_ptr() for tensor in freed] == [
        tensor.data_ptr() for tensor in (weight.values, weight.scale, weight.zero) if tensor is not None
    ]
    for tensor in freed:
        tensor.zero_()
    assert torch.allclose(product(x), expected, rtol=1e-5, atol=1e-4)
    assert method.weight.four_bits
    assert not any(tensor.numel() for tensor in (method.weight.values, method.weight.scale, method.weight.zero))


@pytest.mark.parametrize("gated", [False, True])
def test_a_product_that_differs_in_the_other_order_is_not_taken(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.model.quantization.linear.can_arrange", lambda weight, dtype: has_order(weight))
    method = quantized_method(64, group=128)
    weight = replace(method.weight, scale=method.weight.scale.half())
    method = QuantizedLinear(weight, None, torch.float32)
    if gated:
        method._activation = "silu"  # as the gated product, which a CPU makes in two steps, would note
        monkeypatch.setattr("engine.model.quantization.linear.gated_linear", lambda x, weight, *_: wrong(x, weight))
    else:
        arranged = arrange(replace(weight, scale=2 * weight.scale))
        monkeypatch.setattr("engine.model.quantization.linear.arrange", lambda weight: arranged)
    x = torch.randn(3, 256)
    expected = method.make_product()(x)
    assert method.pack(x) == []
    assert torch.equal(method.make_product()(x), expected)


def wrong(x: Tensor, weight: QuantizedWeight | FourBitWeight) -> Tensor:
    """Of an arranged weight."""
    return x * (2 if isinstance(weight, FourBitWeight) else 1)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMATS)
def test_on_a_gpu_weights_stay_quantized_and_logits_agree(form: str, tmp_path: Path) -> None:
    write(TINY, tmp_path / "q", form)
    write(TINY, tmp_path / "plain", form, dequantized=True)
    check_logits_on_a_gpu(tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("write_one", [write_own_sizes, write_exponents])
def test_on_a_gpu_weights_of_several_forms_stay_quantized(
    write_one: Callable[[Path], dict[str, Tensor]], tmp_path: Path
) -> None:
    values = write_one(tmp_path / "q")
    del values["lm_head.weight"]  # the embeddings' weight
    write(TINY, tmp_path / "plain", "fp8", dequantized=True)
    save_file(values, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    check_logits_on_a_gpu(tmp_path)


def check_logits_on_a_gpu(folders: Path) -> None:
    """Within what rounding to bf16, and inputs of 8 bits, can change. folders: has `q` and `plain`, with the same
    values in fp32."""
    logits = []
    for folder in ("q", "plain"):
        model = load_model(Checkpoint.open(folders / folder), "bfloat16", "cuda", "safetensors")
        probed = probe(model, 128)
        report = fast.apply(model, probed, 128)
        assert report.taken_back is None
        assert not any(tally.refused for tally in report.pieces.values()), str(report)
        with torch.inference_mode():
            logits.append(logits_as_served(Target(model, probed.layers, 128), probed.kv))
        if folder == "q":
            method = method_of(model.get_submodule("model.layers.0.mlp.down_proj"))
            assert isinstance(method, QuantizedLinear)
    difference = (logits[0] - logits[1]).norm(dim=-1) / logits[1].norm(dim=-1)
    assert difference.median() < 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("num_rows", [1, 3, 40, 200])
def test_on_a_gpu_a_ranks_columns_of_groups_that_others_share(bits: int, num_rows: int) -> None:
    torch.manual_seed(0)
    groups = torch.arange(5).repeat_interleave(torch.tensor([133, 164, 0, 120, 95]))[torch.randperm(512)]
    codes, scale = torch.randint(0, 1 << bits, (256, 512), dtype=torch.uint8), torch.rand(256, 5) / 16
    values = (codes.float() - (1 << (bits - 1))) * scale[:, groups]
    with in_threads(2, lambda _: None) as ranks:
        sorted_codes, columns = GroupedCodes(codes, scale, None, 128, bits).by_group("o_proj", groups, ranks)
    assert columns is not None
    weight = sorted_codes.quantized()
    on_gpu = replace(weight, values=weight.values.cuda(), scale=weight.scale.cuda())
    method = QuantizedLinear(on_gpu, None, torch.bfloat16, columns.cuda())
    x = torch.randn(num_rows, 512).bfloat16()
    found, expected = method.make_product()(x.cuda()).cpu().float(), x.float() @ values.t()
    assert float((found - expected).norm() / expected.norm()) < 0.01


@pytest.mark.gpu
def test_install_keeps_one_copy_on_a_gpu() -> None:
    module = torch.nn.Linear(256, 128, bias=False, device="cuda", dtype=torch.bfloat16)
    weight = QuantizedWeight(torch.randn(128, 256, device="cuda").to(torch.float8_e4m3fn), torch.rand(128, 1).cuda())
    method = install(module, weight, torch.bfloat16)
    assert {name for name, _ in module.named_parameters()} == {"weight", "weight_scale"}
    assert isinstance(method, QuantizedLinear)
    assert method.weight.values is module.weight
    x = torch.randn(4, 256, device="cuda", dtype=torch.bfloat16)
    expected = x.float() @ dequantize(weight, torch.float32).T
    assert torch.allclose(method.make_product()(x).float(), expected, atol=2e-2 * float(expected.abs().max()))
