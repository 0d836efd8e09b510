"""The linear method of all quantized formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton_kernels.gated_activation import Activation
from baton_kernels.packed_linear import (
    PackedWeight,
    can_pack_int4,
    can_pack_int8,
    pack_int8,
    packed_linear,
    with_int4,
)
from baton_kernels.quantized_linear import (
    FourBitWeight,
    QuantizedWeight,
    activated_linear,
    arrange,
    can_arrange,
    dequantize,
    gated_linear,
    linear,
    unpack_halves,
    unscaled_activated_linear,
)
from baton_kernels.quantized_linear.tiling import MAX_GATED_ROWS
from engine.model.linear_method import LinearMethod, Product, UnquantizedLinear, concatenate_tensors
from engine.model.tolerance import Tolerance, close, rounding

_ROUNDED_INPUTS = Tolerance(product=0.08, logits=0.5)


class QuantizedLinear(LinearMethod):
    """Multiplies by a quantized weight. bias: [out_features]. columns: for each column of the weight, the column of x
    that it multiplies, int64 (GPTQ with `desc_act` sorts columns by group); None: the same order. Besides all columns
    of x, there may be columns of zeros."""

    def __init__(
        self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype, columns: Tensor | None = None
    ) -> None:
        self.weight, self.bias, self.dtype, self.columns = weight, bias, dtype, columns
        self.out_features = weight.out_features
        self.in_features = weight.in_features if columns is None else 1 + int(columns.max())
        self.input_dtype = weight.values.dtype if weight.by_rows and columns is None else None
        self._packed: PackedWeight | None = None
        self._arranged: FourBitWeight | None = None
        self._activation: Activation | None = None

    @property
    def tolerance(self) -> Tolerance:
        """Looser for 8-bit weights, since the inputs may be quantized to 8 bits as well."""
        return rounding(self.dtype) if self.weight.four_bits else _ROUNDED_INPUTS

    def reference(self, x: Tensor) -> Tensor:
        return F.linear(self._ordered(x), dequantize(self.weight, self.dtype), self.bias)

    def make_product(self) -> Product:
        return self._multiply

    def _multiply(self, x: Tensor) -> Tensor:
        if self._packed is None:
            return linear(self._ordered(x), self._arranged or self.weight, self.bias)
        return packed_linear(x, self._packed, self.bias)

    def pack(self, x: Tensor) -> list[Tensor]:
        return self._arrange(self._ordered(x)) if can_arrange(self.weight, self.dtype) else self._pack(x)

    def _arrange(self, x: Tensor) -> list[Tensor]:
        weight, arranged, bias, activation = self.weight, arrange(self.weight), self.bias, self._activation
        same = close(linear(x, arranged, bias), linear(x, weight, bias), self.tolerance)
        if same and activation is not None:
            found = gated_linear(x, arranged, activation, bias)
            same = close(found, gated_linear(x, weight, activation, bias), self.tolerance)
        if not same:
            return []
        zero = None if weight.zero is None else weight.zero.new_empty(0)
        gone = replace(weight, values=weight.values.new_empty(0), scale=weight.scale.new_empty(0), zero=zero)
        self._arranged, self.weight = arranged, gone
        return [weight.values, weight.scale, *([] if weight.zero is None else [weight.zero])]

    def _pack(self, x: Tensor) -> list[Tensor]:
        if self.weight.values.is_cuda or self.input_dtype != torch.int8 or not can_pack_int8():
            return []
        packed, plain = pack_int8(self.weight.values, self.weight.scale), self.weight.values
        if not close(packed_linear(x, packed, self.bias), self._multiply(x), self.tolerance):
            return []
        self._packed, self.weight = packed, replace(self.weight, values=plain.new_empty(0))
        return [plain]

    def make_gated_product(self, activation: Activation) -> Product:
        """The kernel for few rows applies the activation."""
        if not self.weight.values.is_cuda:
            return super().make_gated_product(activation)
        self._activation = activation

        def gated(x: Tensor) -> Tensor:
            return gated_linear(self._ordered(x), self._arranged or self.weight, activation, self.bias)

        return gated

    def make_mlp(self, activation: Activation, down: LinearMethod) -> Product | None:
        """With many rows, one kernel applies the activation and quantizes its results."""
        if not isinstance(down, QuantizedLinear) or not self._joins(down):
            return None
        weight, bias = down.weight, down.bias
        return self._mlp(activation, down, lambda gate_up: activated_linear(gate_up, activation, weight, bias))

    def make_mlp_for_norm(self, activation: Activation, down: LinearMethod) -> Product | None:
        """With many rows, the norm multiplies the results by their scales."""
        if not isinstance(down, QuantizedLinear) or not self._joins(down) or down.bias is not None:
            return None
        weight = down.weight
        if self.dtype != torch.bfloat16 or weight.values.dtype != torch.float8_e4m3fn:
            return None
        if weight.out_features % 16 or weight.in_features % 16:
            return None  # cuBLAS supports only multiples of 16
        one = torch.ones((), dtype=torch.float32, device=weight.values.device)
        return self._mlp(activation, down, lambda gate_up: unscaled_activated_linear(gate_up, activation, weight, one))

    def _joins(self, down: QuantizedLinear) -> bool:
        return self.weight.values.is_cuda and self.weight.by_rows and down.weight.by_rows

    def _mlp(self, activation: Activation, down: QuantizedLinear, many_rows: Product) -> Product:
        """many_rows: computes the result for many rows of x from the product of gate and up."""
        weight, bias = down.weight, down.bias
        gate_up, gated = self.make_product(), self.make_gated_product(activation)

        def mlp(x: Tensor) -> Tensor:
            if x.numel() // x.shape[-1] > MAX_GATED_ROWS:
                return many_rows(gate_up(x))
            return linear(gated(x), weight, bias)

        return mlp

    @classmethod
    def can_concatenate(cls, parts: Sequence[Self]) -> bool:
        """A block of rows with one scale must not cross the boundary between two parts."""
        first = parts[0]
        return len({part._form for part in parts}) == 1 and all(
            part.weight.out_features % part.weight.scale_rows == 0 and _same(part.columns, first.columns)
            for part in parts
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        first, whole = parts[0], _concatenated([part.weight for part in parts])
        biases = [part.bias for part in parts if part.bias is not None]
        return cls(whole, concatenate_tensors(biases) if biases else None, first.dtype, first.columns)

    @property
    def _form(self) -> tuple[object, ...]:
        return (*_form_of(self.weight), self.in_features, self.dtype, self.bias is None)

    def _ordered(self, x: Tensor) -> Tensor:
        return x if self.columns is None else x.index_select(-1, self.columns)


class LinearOfFourBits(UnquantizedLinear):
    """On a CPU, in bf16: values, and the codes that they come from, by which few rows are multiplied. codes: until
    these are packed, or joined with others; None: there are none of one form."""

    def __init__(self, weight: Tensor, bias: Tensor | None, codes: QuantizedWeight | None) -> None:
        super().__init__(weight, bias)
        self.codes = codes

    def pack(self, x: Tensor) -> list[Tensor]:
        freed, codes = super().pack(x), self.codes
        self.codes = None
        if self._packed is not None and codes is not None:
            own = unpack_halves(codes.values, codes.packed_columns)
            packed = with_int4(self._packed, own, codes.scale, codes.zero, codes.group)
            row = x.reshape(-1, self.in_features)[:1]
            if close(packed_linear(row, packed), packed_linear(row, self._packed), self.tolerance):
                self._packed = packed
        return freed

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        whole = UnquantizedLinear.concatenate(parts)
        found = [part.codes for part in parts if part.codes is not None]
        is_one_form = len(found) == len(parts) and len(set(map(_form_of, found))) == 1
        codes = _concatenated(found) if is_one_form else None
        for part in parts:
            part.codes = None
        return cls(whole.weight, whole.bias, codes)


def install(
    module: nn.Linear, weight: QuantizedWeight, dtype: torch.dtype, columns: Tensor | None = None
) -> LinearMethod:
    """Replace the module's stored parameters, other than the bias, by the weight's tensors, and return the method that
    computes the module. A CPU keeps the weight quantized only where that is faster; else it gets the values.

    dtype: of x and the results. columns: see `QuantizedLinear`.
    """
    for name in [name for name, _ in module.named_parameters(recurse=False) if name != "bias"]:
        delattr(module, name)
    by_rows = weight.by_rows and columns is None
    if not weight.values.is_cuda and not (by_rows and stays_quantized(weight.values.dtype, dtype)):
        whole = dequantize(weight, dtype)
        if columns is not None:
            whole = whole.new_zeros(weight.out_features, module.in_features).index_add_(1, columns, whole)
        module.weight = _parameter(whole)
        if weight.four_bits and columns is None and can_pack_int4(weight.in_features, weight.group, dtype):
            return LinearOfFourBits(module.weight, module.bias, weight)
        return UnquantizedLinear(module.weight, module.bias)
    module.weight, module.weight_scale = _parameter(weight.values), _parameter(weight.scale)
    zero = None if weight.zero is None else _parameter(weight.zero)
    module.register_parameter("weight_zero_point", zero)
    own = QuantizedWeight(module.weight, module.weight_scale, zero, weight.group, weight.scale_rows)
    return QuantizedLinear(own, module.bias, dtype, columns)


def _form_of(weight: QuantizedWeight) -> tuple[object, ...]:
    return weight.values.dtype, weight.scale.dtype, weight.group, weight.scale_rows, weight.zero is None


def _concatenated(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Weights of one form, concatenated along the outputs."""
    zeros = [weight.zero for weight in weights if weight.zero is not None]
    return QuantizedWeight(
        concatenate_tensors([weight.values for weight in weights]),
        concatenate_tensors([weight.scale for weight in weights]),
        concatenate_tensors(zeros) if zeros else None,
        weights[0].group,
        weights[0].scale_rows,
    )


def stays_quantized(values: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether a CPU multiplies by weights of the dtype `values`, with a scale per row, without dequantizing them. In
    fp32 it never does: there a model computes exactly what its weights stand for."""
    return values == torch.int8 and dtype != torch.float32 and can_pack_int8()


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))
