"""Launches of Triton kernels compiled for a Hopper GPU and not run, on a machine that has none.

The interpreter is Python and forgives what Triton's compiler does not: a name whose type differs between two branches,
a function that a GPU lacks. `compiled_launches` makes every launch within it a compilation, with the types, the
constants and the alignment that the launch would have; PDL is on. Triton must not be in its interpreter, so tests start
another process: see `test_compiling.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from baton_kernels import pdl

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_MEMORY = 227 * 1024
"""Bytes that a program may have of it."""
TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.bool: "i1",
}


@contextmanager
def compiled_launches() -> Iterator[list[str]]:
    """The names of the kernels launched within, as they are compiled."""
    names: list[str] = []

    def run(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names.append(function.fn.__name__)
        _compile(function, args, kwargs)

    with patch.object(JITFunction, "run", run), patch.object(pdl, "supported", lambda device: True):
        yield names


def _compile(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    own = {name: value for name, value in kwargs.items() if name in function.arg_names}
    bound = inspect.signature(function.fn).bind(*args, **own)
    bound.apply_defaults()
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], object] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    for i, (parameter, value) in enumerate(zip(function.params, bound.arguments.values(), strict=True)):
        kind = "constexpr" if parameter.is_constexpr else _kind(value, parameter.do_not_specialize)
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[i,] = value
        elif _is_aligned(value) and not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment):
            attributes[i,] = [["tt.divisibility", 16]]
    options = {name: value for name, value in kwargs.items() if name not in own}
    source = GluonASTSource if function.is_gluon() else ASTSource
    compiled = triton.compile(source(function, signature, constants, attributes), target=HOPPER, options=options)
    assert compiled.metadata.shared <= SHARED_MEMORY, function.fn.__name__


def _kind(value: object, do_not_specialize: bool) -> str:
    if isinstance(value, Tensor):
        return "*" + TYPES[value.dtype]
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}>"
    if isinstance(value, GluonDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)},{value.layout!r}>"
    if isinstance(value, float):
        return "fp32"
    if value is None or (value == 1 and not do_not_specialize):
        return "constexpr"
    if isinstance(value, bool):
        return "i1"
    assert isinstance(value, int)
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _is_aligned(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.data_ptr() % 16 == 0
    return isinstance(value, int) and value % 16 == 0
