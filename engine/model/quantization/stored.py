"""What files contain for a quantized layer: parameters in place of `weight`, and codes packed into words of 32 bits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from engine.model.errors import UnsupportedModel
from engine.model.safetensors_index import DTYPES, StoredTensor

_UNUSED = (
    ".input_scale",
    ".input_scale_ub",
    ".activation_scale",
    ".output_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".kv_scale",
    ".input_zero_point",
    ".output_zero_point",
    ".k_zero_point",
    ".v_zero_point",
    ".q_zero_point",
)
"""Calibrated scales of activations and KV caches, which are not needed: ours are computed per token while serving."""


_SHAPE = ".weight_shape"


def is_unused(name: str) -> bool:
    """Whether no layer needs the tensor. Experts do not need `weight_shape`: their words are full."""
    return name.endswith(_UNUSED) or (".experts." in name and name.endswith(_SHAPE))


def replace_weight(module: nn.Linear, **parameters: Tensor) -> None:
    """Replace the module's weight by these parameters, which are on the CPU in untouched memory."""
    del module.weight
    for name, tensor in parameters.items():
        setattr(module, name, nn.Parameter(tensor, requires_grad=False))


def stored_parameter(module: nn.Linear, name: str) -> Tensor:
    """A parameter that `replace_weight` made."""
    tensor = getattr(module, name)
    assert isinstance(tensor, Tensor)
    return tensor.detach()


def stored_parameters(module: nn.Linear) -> dict[str, Tensor]:
    """All parameters that `replace_weight` made, and the bias, by name."""
    return {name: parameter.detach() for name, parameter in module.named_parameters(recurse=False)}


def unpack_words(words: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Unpack int32 words along `dim`, which becomes `32 / bits` times as long, into codes of `bits` bits, uint8. The
    lowest bits are the first code of a word; with `order`, they are its code `order[0]`, and so on."""
    num_codes = 32 // bits
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    last = words.movedim(dim, -1)
    codes = ((last.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).to(torch.uint8)
    if order is not None:
        positions = torch.empty(num_codes, dtype=torch.long, device=words.device)
        positions[torch.tensor(order, device=words.device)] = torch.arange(num_codes, device=words.device)
        codes = codes.index_select(-1, positions)
    return codes.flatten(-2).movedim(-1, dim)


def scale_dtype(name: str, stored: Mapping[str, StoredTensor]) -> torch.dtype:
    """The dtype of groups' scales: the stored one, since bf16 does not fit fp16, nor fp32 either; fp16 without
    files."""
    return DTYPES.get(stored[name].dtype, torch.float16) if name in stored else torch.float16


def scale_shape(name: str, stored: Mapping[str, StoredTensor], num_rows: int) -> tuple[int, ...]:
    """The shape of a scale per tensor or per row, as it is stored: one number or [num_rows], with or without more
    dimensions of 1. num_rows: those of this rank. Raises UnsupportedModel for any other."""
    shape = stored[name].shape if name in stored else ()
    if math.prod(shape) == 1:
        return shape
    if math.prod(shape) != shape[0] or shape[0] < num_rows:
        raise UnsupportedModel(f"{name} is {shape}: neither one scale nor one for each of {num_rows} rows")
    return num_rows, *shape[1:]


def require_whole_blocks(name: str, rows: int, block: int, scale: StoredTensor | None) -> None:
    """Raises UnsupportedModel if the files' scales are not of blocks, or blocks of rows do not end where this rank's
    rows of the layer do. block: 1: not checked."""
    if scale is not None and block > 1 and len(scale.shape) != 2:
        raise UnsupportedModel(f"{scale.name} is {scale.shape}, not one scale for each block of {block} rows")
    if scale is not None and rows % block and scale.shape[0] != -(-rows // block):
        raise UnsupportedModel(f"{name}: fp8 blocks of {block} do not end where its {rows} rows on each rank do")


def per_row(scale: Tensor, num_rows: int) -> Tensor:
    """A scale per tensor or per row as [num_rows, 1]."""
    return scale.float().reshape(-1, 1).expand(num_rows, 1).contiguous()


class QuantizedLayers:
    """The names of quantized layers: those for which the files have a tensor with one of these suffixes. Without files:
    all but lm_head and those listed in `unquantized`."""

    def __init__(
        self, stored: Mapping[str, StoredTensor], suffixes: str | tuple[str, ...], unquantized: Sequence[str] | None
    ) -> None:
        suffixes = (suffixes,) if isinstance(suffixes, str) else suffixes
        self._known = bool(stored)
        self._names = {name.removesuffix(suffix) for name in stored for suffix in suffixes if name.endswith(suffix)}
        self._unquantized = ["lm_head", *(unquantized or ())]

    def __contains__(self, name: str) -> bool:
        if self._known:
            return name in self._names
        return not any(f".{part}." in f".{name}." for part in self._unquantized)


_DUMMY_SCALE, _DUMMY_GROUP_SCALE = 2e-4, 0.004
"""The scales of random 8-bit and 4-bit weights."""
_DUMMY_EXPONENT = 118
"""The scale of random MXFP4 weights: they then have a standard deviation of 0.006. With four times that, a model of
24 layers and a hidden size of 2,880 amplifies rounding so much that no two ways to compute it agree."""


def fill_experts_with_dummies(module: nn.Module) -> bool:
    """Like `fill_with_dummies`, for a module of experts in MXFP4, fp8, int8 or words of several codes."""
    parameters = dict(module.named_parameters(recurse=False))
    packed = any(parameter.dtype == torch.int32 for parameter in parameters.values())
    in_bytes = any(name.endswith("_blocks") or _is_byte(own) for name, own in parameters.items())
    if not packed and not in_bytes:
        return False
    for name, parameter in parameters.items():
        if parameter.dtype == torch.int32:
            parameter.random_(-(2**31), 2**31)
        elif packed:
            parameter.fill_(_DUMMY_GROUP_SCALE if "scale" in name else 0)
        elif name.endswith("_blocks"):
            parameter.random_(0, 256)
        elif name.endswith("_scales"):
            parameter.fill_(_DUMMY_EXPONENT)
        elif _is_fp8(parameter):
            for expert in parameter:
                _fill_fp8(expert)
        elif parameter.dtype == torch.int8 and "zero_point" not in name:
            parameter.random_(-127, 128)
        else:
            parameter.fill_(_DUMMY_SCALE if "_scale" in name else 0)
    return True


def _is_byte(parameter: Tensor) -> bool:
    return _is_fp8(parameter) or parameter.dtype == torch.int8


def _is_fp8(parameter: Tensor) -> bool:
    return parameter.dtype == torch.float8_e4m3fn


def _fill_fp8(parameter: Tensor) -> None:
    largest = torch.finfo(parameter.dtype).max  # some versions of torch make larger values NaN
    parameter.copy_((torch.randn(parameter.shape, device=parameter.device) * 100).clamp_(-largest, largest))


def fill_with_dummies(module: nn.Linear) -> bool:
    """Fill the parameters of any format with random values, so that weights are about as large as a real model's.
    Returns False if the module's weight is not quantized."""
    parameters = dict(module.named_parameters(recurse=False))
    weight = parameters.get("weight")
    if weight is not None and weight.dtype not in (torch.float8_e4m3fn, torch.int8):
        return False
    scale = _DUMMY_GROUP_SCALE if weight is None else _DUMMY_SCALE
    for name, parameter in parameters.items():
        if name == "weight_shape":
            delattr(module, name)  # it is known without files
        elif _is_fp8(parameter):
            _fill_fp8(parameter)
        elif parameter.dtype == torch.int8:
            parameter.random_(-127, 128)
        elif parameter.dtype == torch.int32:
            parameter.random_(-(2**31), 2**31)
        else:
            parameter.fill_(0.0 if name == "bias" else scale)
    return True
