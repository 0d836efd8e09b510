"""Reads a checkpoint's weights straight into an empty model, if they only have to be put in their places.

A checkpoint that needs conversion, or whose tensors are not exactly the model's, is left to transformers: `NotDirect`
says why.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.model.load.checkpoint import Checkpoint
from engine.model.load.parallel_read import FileSpan, cut_spans, read_spans, run_spans
from engine.model.load.placing import NotDirect, Place, Placing
from engine.model.load.progress import Loaded
from engine.model.parallel.cut import Cut
from engine.model.safetensors_index import DTYPES, StoredTensor

_COMPARE_BYTES = 16 << 20
_BIAS_OF_EXPERT = r"\.experts\.\d+\.\w+\.bias$"
_COMPUTED = r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$"
_CODES = frozenset({torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2})
"""Dtypes whose numbers mean nothing without scales."""


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


class Source(NamedTuple):
    """The stored tensor, or its part `cut`, that fills `slices` of one of the model's tensors."""

    stored: StoredTensor
    target: Tensor
    cut: Cut | None = None
    slices: tuple[int | slice, ...] = ()

    @property
    def num_bytes(self) -> int:
        """The size of the wanted part of the stored tensor."""
        if self.cut is None:
            return self.stored.num_bytes
        return sum(runs.num_runs * runs.length for runs in self.cut.runs()) * DTYPES[self.stored.dtype].itemsize


def match(
    model: PreTrainedModel, stored: Mapping[str, StoredTensor], cut_of: Callable[[Tensor], Cut | None] = lambda _: None
) -> dict[int, list[Source]]:
    """The sources that fill each of the model's tensors, by the tensors' ids. Tied tensors are one, which may be stored
    once, or several times with equal bytes; experts may be stored one by one. cut_of: the part of a tensor that this
    model has.

    Raises NotDirect unless shapes, and names after transformers' renamings, are exactly the model's.
    """
    if kept := _kept_in_fp32(model):
        raise NotDirect(f"the model keeps {', '.join(kept)} in fp32")
    own: dict[str, Tensor] = model.state_dict(keep_vars=True)
    placing = Placing(model)
    places = {name: placing.of(name) for name in stored if not _is_left_out(model, own, placing, stored[name])}
    if unexpected := sorted(name for name, place in places.items() if place.name not in own):
        raise NotDirect(f"the model has no {unexpected[0]}")
    found: dict[int, dict[tuple[int | None, int], StoredTensor]] = {}
    sources: dict[int, list[Source]] = {}
    for name, place in places.items():
        tensor, target = stored[name], own[place.name]
        cut = cut_of(target)
        _require_fitting(tensor, place, target.dtype, tuple(target.shape) if cut is None else cut.whole)
        first = found.setdefault(id(target), {}).setdefault((place.expert, place.part), tensor)
        if first is tensor and place.is_in(cut):
            source = Source(tensor, target, place.cut(cut), place.slices(cut, tuple(target.shape)))
            sources.setdefault(id(target), []).append(source)
        elif first is not tensor and not _same_bytes(first, tensor):
            raise NotDirect(f"{name} and {first.name} are tied, but differ")
    for name, target in own.items():
        _require_all(name, target, cut_of(target), found.get(id(target), {}), places)
    return sources


def _is_left_out(model: PreTrainedModel, own: Mapping[str, Tensor], placing: Placing, tensor: StoredTensor) -> bool:
    """Whether files may contain this tensor although the model does not have it: computed tables (files of Llama 2),
    experts' biases that are zero (AutoGPTQ), and tensors that the model class ignores, such as layers that predict
    several tokens (GLM-4.5, DeepSeek-V3)."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    name = tensor.name
    is_zero_bias = re.search(_BIAS_OF_EXPERT, name) and not any(_bytes(tensor))
    if not is_zero_bias and not any(re.search(pattern, name) for pattern in (*patterns, _COMPUTED)):
        return False
    try:
        return placing.of(name).name not in own
    except NotDirect:
        return False


def _bytes(tensor: StoredTensor) -> bytes:
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        return file.read(tensor.num_bytes)


def _require_fitting(tensor: StoredTensor, place: Place, own: torch.dtype, whole: tuple[int, ...]) -> None:
    """Raises NotDirect if the tensor does not fit its place. Codes fit only a tensor of the same dtype."""
    dtype = DTYPES[tensor.dtype]
    if dtype != own and not _CODES.isdisjoint((dtype, own)):
        raise NotDirect(f"transformers converts {tensor.name}, which is {tensor.dtype}")
    if place.expert is not None and (len(whole) < 2 or place.expert >= whole[0]):
        raise NotDirect(f"transformers converts {tensor.name}")
    shape = place.stored_shape(whole)
    is_same = tensor.shape == shape or (
        place.expert is not None and _without_ones(tensor.shape) == _without_ones(shape)
    )
    if not is_same:
        raise NotDirect(f"{tensor.name} is {tensor.shape}, not {shape} as in the model")


def _without_ones(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size != 1]


def _require_all(
    name: str,
    target: Tensor,
    cut: Cut | None,
    found: Mapping[tuple[int | None, int], StoredTensor],
    places: Mapping[str, Place],
) -> None:
    """Raises NotDirect if some of a tensor of the model is not stored."""
    if not found:
        raise NotDirect(f"the checkpoint has no {name}")
    if found.keys() == {(None, 0)}:
        return
    num_experts = target.shape[0] if cut is None else cut.whole[0]
    num_parts = {places[tensor.name].num_parts for tensor in found.values()}
    if {len(found)} != {num_experts * num for num in num_parts}:
        raise NotDirect(f"the checkpoint has not all experts of {name}")


def fill(sources: Iterable[Source], loaded: Loaded) -> None:
    """Read the tensors, or their parts, into their targets, which may have got memory only after `match`."""
    read_spans([span for source in sources for span in _spans(source)], loaded.add)


def _spans(source: Source) -> Iterator[FileSpan]:
    stored, dtype = source.stored, DTYPES[source.stored.dtype]
    target = source.target.data[source.slices]
    assert target.is_contiguous(), source
    if source.cut is None:
        assert stored.num_bytes == target.numel() * dtype.itemsize, source
        yield from cut_spans(stored.file, stored.offset, dtype, target)
        return
    rows, start = target.flatten(source.cut.dim).view(math.prod(target.shape[: source.cut.dim]), -1), 0
    for runs in source.cut.runs():
        end = start + runs.length
        yield from run_spans(stored.file, stored.offset, dtype, rows[:, start:end], runs)
        start = end
    rows[:, start:].zero_()


def _kept_in_fp32(model: PreTrainedModel) -> list[str]:
    """Patterns of modules that transformers would not cast to fp16."""
    return sorted(getattr(model, "_keep_in_fp32_modules", None) or ()) if model.dtype == torch.float16 else []


def _same_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    if (one.dtype, one.num_bytes) != (other.dtype, other.num_bytes):
        return False
    with one.file.open("rb") as a, other.file.open("rb") as b:
        a.seek(one.offset)
        b.seek(other.offset)
        sizes = (min(_COMPARE_BYTES, one.num_bytes - at) for at in range(0, one.num_bytes, _COMPARE_BYTES))
        return all(a.read(size) == b.read(size) for size in sizes)
