"""Replaces plain weights by the layout that the processor multiplies fastest: on a CPU, and for 4-bit weights on a
GPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.model.fast.target import Target
from engine.model.linear_method import method_of

MIN_FP32_BYTES = 64 << 20
"""In fp32, models whose weights have fewer bytes keep torch's own products: they fit a processor's cache, and parity
tests, which use small models, then compare exactly transformers' operations."""


@torch.inference_mode(False)
@torch.no_grad()
def pack_products(target: Target) -> list[int]:
    """Pack the weights of the installed products, one after another, so that only one product has its weights twice at
    a time. Returns, for each product that has such a layout, the bytes of the weights that were replaced; the layout
    takes about as many. An embedding table that is tied to the head stays, in addition to the packed weight."""
    if target.model.device.type == "cpu" and target.model.dtype == torch.float32:
        num_bytes = sum(method.in_features * method.out_features * 4 for method in target.products)
        if num_bytes < MIN_FP32_BYTES:
            return []
    layers, others = _parameters(target.model)
    packed = []
    for method in target.products:
        replaced = method.pack(target.inputs(method.in_features))
        if replaced:
            packed.append(sum(weight.nbytes for weight in replaced))
        for weight in replaced:
            if _place(weight) not in others:
                for parameter in [each for each in layers.get(_place(weight), ()) if _is_within(each, weight)]:
                    parameter.data = parameter.new_empty(0)
    return packed


def _is_within(parameter: Tensor, weight: Tensor) -> bool:
    """Whether the weight, in the same memory, includes the parameter. A joint product that is not used leaves its
    layers in one memory, each with the weight of a product of its own."""
    return parameter.data_ptr() == weight.data_ptr() or weight.nbytes == weight.untyped_storage().nbytes()


def _parameters(model: nn.Module) -> tuple[dict[int, list[nn.Parameter]], set[int]]:
    """The parameters of linear layers, by their memory; and the memory of all other parameters."""
    layers: dict[int, list[nn.Parameter]] = {}
    others = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if method_of(module) is not None:
                layers.setdefault(_place(parameter), []).append(parameter)
            else:
                others.add(_place(parameter))
    return layers, others


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
