"""Linear methods: what computes a linear layer, chosen at load, with its own weights, scales and tolerance.

    Quantization.create_weights                 gives the module the parameters that the checkpoint stores
    (weights are read)
    Quantization.process_weights_after_loading  makes a LinearMethod, which holds the weights as its product needs them
    LinearMethod.concatenate                    `engine.model.fast` merges q, k and v, and gate and up
    LinearMethod.make_product                   makes the function that runs while serving
    LinearMethod.pack                           changes the weights into the layout of the fastest product, if any

After vLLM's QuantizationConfig and LinearMethodBase (vllm/model_executor/layers/linear.py). An adapter is a
LinearMethod around another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from baton_kernels.gated_activation import Activation, gated_activation
from baton_kernels.linear import gated_linear, linear
from baton_kernels.packed_linear import PackedWeight, can_pack, pack, packed_linear
from engine.model.experts import expert_modules
from engine.model.tolerance import Tolerance, close, rounding

if TYPE_CHECKING:
    from engine.model.parallel.group import RankGroup

Product = Callable[[Tensor], Tensor]
"""Maps x, [..., in_features], to [..., out_features], in one dtype."""

ProductInto = Callable[[Tensor, Tensor], None]
"""Writes the product of x, [num_rows, in_features], to a tensor [num_rows, out_features]; both contiguous."""

_METHOD = "baton_linear_method"


class LinearMethod(ABC):
    """The product of one linear layer, or of several over one input.

    Owns its weights; a module's parameters may be the same tensors, or views of them. `dtype`: the dtype of x and of
    the results, whatever dtype the weights have.
    """

    in_features: int
    out_features: int
    dtype: torch.dtype
    input_dtype: torch.dtype | None = None
    """The dtype to which the product quantizes many rows of x; None: it does not."""

    @property
    def tolerance(self) -> Tolerance:
        """How far the fast product may differ from `reference`, and a concatenated product from its parts."""
        return rounding(self.dtype)

    @abstractmethod
    def reference(self, x: Tensor) -> Tensor:
        """The product in plain torch. It serves until the fast product is found to agree, and where it does not."""

    @abstractmethod
    def make_product(self) -> Product:
        """The fast product, as a function of x alone. Made once at load, so that a call looks nothing up."""

    def make_product_into(self) -> ProductInto:
        """The fast product of many rows, for callers that provide the output tensor."""
        product = self.make_product()

        def into(x: Tensor, out: Tensor) -> None:
            out.copy_(product(x))

        return into

    def make_gated_product(self, activation: Activation) -> Product:
        """Maps [..., in_features] to [..., out_features / 2]: the product followed by a gated MLP's activation. The
        outputs of the product are those of gate, then those of up."""
        product = self.make_product()

        def gated(x: Tensor) -> Tensor:
            return gated_activation(product(x), activation)

        return gated

    def make_mlp(self, activation: Activation, down: LinearMethod) -> Product | None:
        """The gated product followed by `down`, as one function; None: computing them together gains nothing."""
        return None

    def make_mlp_for_norm(self, activation: Activation, down: LinearMethod) -> Product | None:
        """Like `make_mlp`, where only `rms_norm` reads the results, and may finish them; None: that gains nothing."""
        return None

    def pack(self, x: Tensor) -> list[Tensor]:
        """Switch the products that were made to the fastest layout of the weights, if there is one and its product of x
        agrees. Returns the tensors that they no longer need, for the caller to free. Afterwards, neither call
        `reference` nor make further products."""
        return []

    @classmethod
    @abstractmethod
    def can_concatenate(cls, parts: Sequence[Self]) -> bool:
        """Whether parts of this class can become one product over one input."""

    @classmethod
    @abstractmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """One method with the outputs of all parts, in order. `can_concatenate` must hold. The parts remain usable, and
        share the memory of the whole."""


class UnquantizedLinear(LinearMethod):
    """weight: [out_features, in_features], as in nn.Linear, with any strides; bias: [out_features]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self._packed: PackedWeight | None = None

    def reference(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def make_product(self) -> Product:
        if not self.weight.is_cuda:
            return self._multiply
        weight, bias = self.weight, self.bias

        def product(x: Tensor) -> Tensor:
            return linear(x, weight, bias)

        return product

    def make_product_into(self) -> ProductInto:
        if not self.weight.is_cuda:
            return super().make_product_into()
        weight, bias = self.weight, self.bias

        def into(x: Tensor, out: Tensor) -> None:
            if bias is None:
                torch.mm(x, weight.t(), out=out)
            else:
                torch.addmm(bias, x, weight.t(), out=out)

        return into

    def _multiply(self, x: Tensor) -> Tensor:
        if self._packed is None:
            return linear(x, self.weight, self.bias)
        return packed_linear(x, self._packed, self.bias)

    def pack(self, x: Tensor) -> list[Tensor]:
        if not can_pack(self.weight):
            return []
        packed = pack(self.weight)
        if not close(packed_linear(x, packed, self.bias), self._multiply(x), self.tolerance):
            return []
        self._packed, plain = packed, self.weight
        self.weight = plain.new_empty(0)
        return [plain]

    def make_gated_product(self, activation: Activation) -> Product:
        """The activation is part of the kernel, if one is chosen for the shape."""
        if not self.weight.is_cuda:
            return super().make_gated_product(activation)
        weight, bias = self.weight, self.bias

        def gated(x: Tensor) -> Tensor:
            return gated_linear(x, weight, activation, bias)

        return gated

    @classmethod
    def can_concatenate(cls, parts: Sequence[Self]) -> bool:
        return len({(part.in_features, part.dtype, part.bias is None) for part in parts}) == 1

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        weight = concatenate_tensors([part.weight for part in parts])
        biases = [part.bias for part in parts if part.bias is not None]
        return cls(weight, concatenate_tensors(biases) if biases else None)


class Quantization(ABC):
    """How a checkpoint stores linear layers, and which method computes them; one per model. `name`: the module's name
    in the model."""

    def stored_dim(self, parameter: str, dim: int) -> int | None:
        """The dimension of a linear layer's stored tensor of that name that runs along the weight's outputs (`dim` 0)
        or inputs (1); each of its entries stands for equally many of these. None: there is no such dimension."""
        return dim if parameter.startswith("weight") else None

    def divide(self, columns: Mapping[nn.Module, RankGroup]) -> None:  # noqa: B027 - most find nothing
        """Tell the quantization that the model is a rank's part. columns: the linear layers and experts (their down)
        that hold only some columns of a weight, each with the group whose ranks hold the others. Scales computed while
        weights load must be the same as for the whole weight."""

    @abstractmethod
    def create_weights(self, name: str, module: nn.Linear) -> None:
        """Give the module the parameters that the files contain for it, with their names, shapes and dtypes, on the CPU
        in untouched memory."""

    def process_weights_after_loading(self, name: str, module: nn.Linear, dtype: torch.dtype) -> LinearMethod:
        """The method for the module, whose parameters have been read and are on their device. dtype: the model's."""
        return UnquantizedLinear(module.weight, module.bias)

    def create_expert_weights(self, name: str, module: nn.Module) -> None:  # noqa: B027 - most have plain experts
        """Like `create_weights`, for experts (see `engine.model.experts`)."""

    def expert_parameter_shape(self, name: str, parameter: str, weight: tuple[int, ...]) -> tuple[int, ...] | None:
        """The shape of the parameter that `create_expert_weights` puts in place of a weight of the shape `weight`, for
        experts that files store one by one; None: the module has no such experts. name: the module's."""
        return None

    def expert_stored_dim(self, name: str, kind: str, dim: int) -> int | None:
        """Like `stored_dim`, for a parameter in place of a weight of experts, whose dimension 0 is the expert. kind:
        the suffix of the parameter's name, after the weight's."""
        return dim

    def expert_block(self, name: str) -> int:
        """How many of the features between gate and down share a scale or a word in the files of that module's experts:
        a rank must hold all of them or none. 1: features are independent."""
        return 1

    def process_experts(self, name: str, module: nn.Module, dtype: torch.dtype) -> bool:
        """Like `process_weights_after_loading`, for experts. Idempotent. Returns whether they are quantized now."""
        return False


class Unquantized(Quantization):
    """Weights as nn.Linear has them."""

    def create_weights(self, name: str, module: nn.Linear) -> None:
        """Nothing to do: nn.Linear has them."""


def create_weights(model: nn.Module, quantization: Quantization) -> None:
    """Give all linear layers, and experts, the parameters that the checkpoint stores, before anything is read."""
    for name, module in linear_layers(model):
        quantization.create_weights(name, module)
    for name, experts in expert_modules(model):
        quantization.create_expert_weights(name, experts)


@torch.no_grad()
def process_weights_after_loading(
    model: nn.Module, quantization: Quantization, dtype: torch.dtype, part: nn.Module | None = None
) -> None:
    """Attach to each linear layer the method that computes it, and process experts. part: process only its modules.
    Layers that already have a method are left alone."""
    within = set((part or model).modules())
    layers = [(name, module) for name, module in linear_layers(model) if module in within]
    for name, module in layers:
        if _METHOD not in module.__dict__:
            attach(module, quantization.process_weights_after_loading(name, module, dtype))
    for name, experts in expert_modules(model):
        if experts in within:
            quantization.process_experts(name, experts, dtype)


def attach(module: nn.Module, method: LinearMethod) -> None:
    """Make `method` compute the module: by its reference, until `engine.model.fast` installs its fast product."""
    module.__dict__[_METHOD] = method
    module.forward = method.reference


def method_of(module: object) -> LinearMethod | None:
    """The method that computes the module: the attached one; or a new one over its weights, for a linear layer that
    transformers made and loaded (of GPT-2's with inputs as rows: over a view); None if it is not a linear layer."""
    if not isinstance(module, nn.Module):
        return None
    attached: LinearMethod | None = module.__dict__.get(_METHOD)
    if attached is None and type(module) is nn.Linear and module.weight.is_floating_point():
        return UnquantizedLinear(module.weight, module.bias)
    if attached is None and type(module) is Conv1D:
        weight, bias = module.parameters()
        return UnquantizedLinear(weight.t(), bias)
    return attached


def fusable(modules: Iterable[nn.Module | None]) -> dict[nn.Module, LinearMethod]:
    """The modules' methods if they can become one: all modules exist, and their methods are of one class that can
    concatenate them. Otherwise empty."""
    methods: dict[nn.Module, LinearMethod] = {}
    for module in modules:
        method = method_of(module)
        if module is None or method is None:
            return {}
        methods[module] = method
    parts = list(methods.values())
    kind = type(parts[0])
    return methods if all(type(part) is kind for part in parts) and kind.can_concatenate(parts) else {}


def fuse(methods: Iterable[LinearMethod]) -> LinearMethod:
    """One method for all of these, which must be `fusable`."""
    parts = list(methods)
    return type(parts[0]).concatenate(parts)


@torch.inference_mode(False)
@torch.no_grad()
def concatenate_tensors(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the parts along their first dimension; the parts become views of the result. Parts that are already
    adjacent in memory are not copied."""
    first = parts[0]
    if _adjacent(parts):
        rows = sum(part.shape[0] for part in parts)
        return first.detach().as_strided((rows, *first.shape[1:]), first.stride())
    whole = torch.cat([part.detach() for part in parts])
    start = 0
    for part in parts:
        part.data = whole[start : start + part.shape[0]]
        start += part.shape[0]
    return whole


def _adjacent(parts: Sequence[Tensor]) -> bool:
    end = parts[0].data_ptr()
    storage = parts[0].untyped_storage().data_ptr()
    for part in parts:
        if part.data_ptr() != end or part.untyped_storage().data_ptr() != storage or not part.is_contiguous():
            return False
        end += part.numel() * part.element_size()
    return True


def linear_layers(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """All modules of exactly the class nn.Linear, with their names: subclasses have their own forward."""
    return [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
