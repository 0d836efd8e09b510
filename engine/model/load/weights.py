"""Reads a checkpoint's weights straight into an empty model, if their names and shapes are the model's own.

A checkpoint that needs conversion, or whose tensors are not exactly the model's, is left to transformers: `NotDirect`
says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from engine.model.load.checkpoint import Checkpoint
from engine.model.load.parallel_read import FileSpan, cut_spans, read_spans
from engine.model.load.progress import Loaded
from engine.model.load.safetensors_index import DTYPES, StoredTensor
from engine.model.parallel.cut import Cut

_COMPARE_BYTES = 16 << 20


class NotDirect(Exception):
    """Loading this checkpoint takes more than copying its tensors."""


def stored_weights(checkpoint: Checkpoint) -> Mapping[str, StoredTensor]:
    """The checkpoint's tensors by name. Raises NotDirect, and UnsupportedModel for broken files."""
    if getattr(checkpoint.config, "transformers_weights", None) is not None:
        raise NotDirect("its config.json names a weight file of its own")
    stored = checkpoint.weights
    if not stored:
        raise NotDirect("it has neither model.safetensors nor an index")
    if unknown := sorted({tensor.dtype for tensor in stored.values()} - DTYPES.keys()):
        raise NotDirect(f"it holds tensors of type {', '.join(unknown)}")
    return stored


def stored_dtype(stored: Mapping[str, StoredTensor]) -> torch.dtype:
    """The one floating-point dtype of the tensors. Raises NotDirect when there are several."""
    dtypes = {DTYPES[tensor.dtype] for tensor in stored.values()}
    floating = [dtype for dtype in dtypes if dtype.is_floating_point]
    if len(floating) != 1:
        raise NotDirect(f"its config.json states no dtype and its tensors have {len(floating)}")
    return floating[0]


def match(
    model: PreTrainedModel, stored: Mapping[str, StoredTensor], cut_of: Callable[[Tensor], Cut | None] = lambda _: None
) -> list[tuple[StoredTensor, Tensor]]:
    """Which stored tensor fills which of the model's, or of which a part does. Tied tensors are one, stored once, or
    more often with equal bytes.

    Raises NotDirect unless the names and shapes are exactly the model's.
    """
    if kept := _kept_in_fp32(model):
        raise NotDirect(f"the model keeps {', '.join(kept)} in fp32")
    _refuse_converted(model, stored)
    own: dict[str, Tensor] = model.state_dict(keep_vars=True)
    if unexpected := sorted(stored.keys() - own.keys()):
        raise NotDirect(f"the model has no {unexpected[0]}")
    sources: dict[int, StoredTensor] = {}
    for name, tensor in stored.items():
        cut = cut_of(own[name])
        shape = tuple(own[name].shape) if cut is None else cut.whole
        if tensor.shape != shape:
            raise NotDirect(f"{name} is {tensor.shape}, not {shape} as in the model")
        first = sources.setdefault(id(own[name]), tensor)
        if first is not tensor and not _same_bytes(first, tensor):
            raise NotDirect(f"{name} and {first.name} are tied, but differ")
    if missing := [name for name, tensor in own.items() if id(tensor) not in sources]:
        raise NotDirect(f"the checkpoint has no {missing[0]}")
    targets = {id(tensor): tensor for tensor in own.values()}
    return [(source, targets[key]) for key, source in sources.items()]


def fill(
    matched: list[tuple[StoredTensor, Tensor]],
    loaded: Loaded,
    cut_of: Callable[[Tensor], Cut | None] = lambda _: None,
) -> None:
    """Read the tensors into their targets, or of each the part that its target holds."""
    read_spans([span for source, target in matched for span in _spans(source, target, cut_of(target))], loaded.add)


def num_bytes(source: StoredTensor, target: Tensor) -> int:
    """What is read of the stored tensor."""
    return min(source.num_bytes, target.numel() * DTYPES[source.dtype].itemsize)


def _spans(source: StoredTensor, target: Tensor, cut: Cut | None) -> Iterator[FileSpan]:
    dtype = DTYPES[source.dtype]
    assert target.is_contiguous(), source
    if cut is None:
        assert source.num_bytes == target.numel() * dtype.itemsize, source
        yield from cut_spans(source.file, source.offset, dtype, target.data)
        return
    flat, at = target.data.view(-1), 0
    for first, length in cut.runs():
        yield from cut_spans(source.file, source.offset + first * dtype.itemsize, dtype, flat[at : at + length])
        at += length
    flat[at:].zero_()


def _kept_in_fp32(model: PreTrainedModel) -> list[str]:
    """Patterns of modules that transformers would not cast to the model's dtype."""
    always = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    in_half = getattr(model, "_keep_in_fp32_modules", None) or ()
    kept = {torch.float16: {*always, *in_half}, torch.bfloat16: set(always)}
    return sorted(kept.get(model.dtype, ()))


def _refuse_converted(model: PreTrainedModel, stored: Mapping[str, StoredTensor]) -> None:
    """Some conversions keep a tensor's name and change its values, so equal names are not enough."""
    transforms = get_model_conversion_mapping(model)
    for name in stored:
        if any(transform.rename_source_key(name)[1] is not None for transform in transforms):
            raise NotDirect(f"transformers converts {name}")


def _same_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    if (one.dtype, one.num_bytes) != (other.dtype, other.num_bytes):
        return False
    with one.file.open("rb") as a, other.file.open("rb") as b:
        a.seek(one.offset)
        b.seek(other.offset)
        sizes = (min(_COMPARE_BYTES, one.num_bytes - at) for at in range(0, one.num_bytes, _COMPARE_BYTES))
        return all(a.read(size) == b.read(size) for size in sizes)
