"""Weights in the layout that the processor multiplies fastest, in place of the plain ones: on a CPU, and on a GPU those
of 4 bits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.model.fast.target import Target

MIN_FP32_BYTES = 64 << 20
"""Models in fp32 with fewer bytes in their products are left to torch's own: they fit a processor's cache, and tests of
parity, which small models are for, then compare the very operations of transformers."""


@torch.inference_mode(False)
@torch.no_grad()
def pack_products(target: Target) -> list[int]:
    """Pack the products that were put in, one after another, so that only one has its weights twice. For each for which
    there is such a layout, the bytes of the weights that gave way; the layout takes about as many. An embedding table
    that makes the logits, too, stays besides."""
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
                for parameter in layers.pop(_place(weight), ()):
                    parameter.data = parameter.new_empty(0)
    return packed


def _parameters(model: nn.Module) -> tuple[dict[int, list[nn.Parameter]], set[int]]:
    """By the memory that they are in: the parameters of linear layers; and the memory of all others."""
    layers: dict[int, list[nn.Parameter]] = {}
    others = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if type(module) is nn.Linear:
                layers.setdefault(_place(parameter), []).append(parameter)
            else:
                others.add(_place(parameter))
    return layers, others


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
