"""Triton's interpreter in half of the time: without what it works out again for each operation, and with reductions by
halves. Kernels' tests spend nearly all of their time in it. What it computes stays the same.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def hasten() -> None:
    """Imports triton."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    core: Any = importlib.import_module("triton.language.core")
    interpreter._get_np_dtype = _look_up_once(interpreter._get_np_dtype)
    interpreter._patch_lang = _patch_once(interpreter._patch_lang)
    interpreter.ReduceOps.generic_reduce = _reduce_by_halves
    core.block_type.__init__ = _describe_type_once(core.block_type.__init__)
    core.tensor.__init__ = _describe_shape_once(core.tensor.__init__)


def _look_up_once(look_up: Callable[[Any], np.dtype[Any]]) -> Callable[[Any], np.dtype[Any]]:
    """It makes a table of all types for each."""
    known: dict[str, np.dtype[Any]] = {}

    def numpy_dtype(dtype: Any) -> np.dtype[Any]:
        scalar = dtype.scalar
        if (found := known.get(scalar.name)) is None:
            found = known[scalar.name] = look_up(scalar)
        return found

    return numpy_dtype


def _patch_once(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Each function that a kernel calls patches the language again, for which it goes through all of its names."""
    active: list[_Scope] = []

    def patch_once(function: Any) -> Any:
        before = active[-1].languages if active else frozenset[str]()
        languages = _languages_of(function) | before
        if active and languages == before:
            return active[-1]
        active.append(_Scope(patch(function), languages, active))
        return active[-1]

    return patch_once


class _Scope:
    """What a kernel has patched, until it ends. The functions that it calls restore nothing."""

    def __init__(self, scope: Any, languages: frozenset[str], active: list[_Scope]) -> None:
        self.languages = languages
        self._scope, self._active = scope, active

    def restore(self) -> None:
        del self._active[self._active.index(self) :]
        self._scope.restore()


@functools.cache
def _languages_of(function: Any) -> frozenset[str]:
    modules = "triton.language", "triton.language.core"
    names = (getattr(value, "__name__", None) for value in function.__globals__.values())
    return frozenset(name for name in names if name in modules)


def _describe_type_once(describe: Callable[..., None]) -> Callable[..., None]:
    """A block's shape is validated and written out each time."""
    known: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple(getattr(size, "value", size) for size in shape)
        if (found := known.get(key)) is None:
            describe(self, element_ty, shape)
            known[key] = dict(self.__dict__)
        else:
            self.__dict__.update(found)

    return init


def _describe_shape_once(describe: Callable[..., None]) -> Callable[..., None]:
    """A tensor wraps each number of its shape, and the types of these numbers."""
    known: dict[str, tuple[Any, Any]] = {}

    def init(self: Any, handle: Any, kind: Any) -> None:
        if (found := known.get(kind.name)) is None:
            describe(self, handle, kind)
            known[kind.name] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, kind, kind.scalar
            self.shape, self.numel = found

    return init


def _reduce_by_halves(self: Any, blocks: Sequence[Any]) -> list[Any]:
    """As `ReduceOps.generic_reduce`, which combines one number after the other: all neighbours at once, and again. The
    length of a block is a power of two."""
    parts, axis = self.unravel(blocks, self.axis)
    left = [np.moveaxis(part.handle.data, axis, 0) for part in parts]
    while len(left[0]) > 1:
        pairs = [self.to_tensor(data[i::2], part.dtype) for i in (0, 1) for data, part in zip(left, parts, strict=True)]
        combined = self.combine_fn.fn(*pairs)
        left = [new.handle.data for new in (combined if isinstance(combined, tuple) else (combined,))]
    results = [data[0] for data in left]
    if self.keep_dims:
        dims = axis if self.axis is not None else tuple(range(blocks[0].handle.data.ndim))
        results = [np.expand_dims(data, dims) for data in results]
    return [self.to_tensor(data, part.dtype) for data, part in zip(results, parts, strict=True)]
