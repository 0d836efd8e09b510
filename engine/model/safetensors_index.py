"""The tensors of safetensors files, read from their headers alone.

A file consists of 8 bytes with the header's length, the header (JSON: name -> dtype, shape, offsets), and the data
without gaps.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint import read_json
from engine.model.errors import UnsupportedModel

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""The dtypes that can be read directly; files may have others (F8_E5M2, ...)."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor's bytes are. `dtype`: as the file spells it. `offset`: from the beginning of the file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def weight_files(path: Path) -> list[Path]:
    """The files that transformers would load from a checkpoint's folder: model.safetensors, or the shards of its index;
    none when there is neither. Raises UnsupportedModel for an index that names no files."""
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        return []
    try:
        shards = read_json(index).get("weight_map")
    except ValueError as error:
        raise UnsupportedModel(f"{path}: {error}") from error
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise UnsupportedModel(f"{index} has no weight_map with the names of files")
    return [path / name for name in sorted(set(shards.values()))]


def read_stored(files: list[Path]) -> dict[str, StoredTensor]:
    """All tensors of the files by name. Raises UnsupportedModel for a file that is truncated or not safetensors."""
    return {tensor.name: tensor for file in files for tensor in _read_header(file)}


def _read_header(file: Path) -> list[StoredTensor]:
    try:
        size = file.stat().st_size
        if size < 8:  # a pipe, which nobody may ever write to, has no size either
            raise ValueError("it has no header")
        with file.open("rb") as data:
            length = int.from_bytes(data.read(8), "little")
            if 8 + length > size:
                raise ValueError("the header is longer than the file")
            header: Any = json.loads(data.read(length))
        if not isinstance(header, dict):
            raise ValueError("the header is no object")
        header.pop("__metadata__", None)
        tensors = [_stored(name, file, 8 + length, entry) for name, entry in header.items()]
        end = _end_of(tensors, 8 + length)
        if end < size:
            raise ValueError(f"{size - end} bytes at its end belong to no tensor")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UnsupportedModel(f"{file} cannot be read: {error}") from error
    if cut := [tensor.name for tensor in tensors if tensor.offset + tensor.num_bytes > size]:
        raise UnsupportedModel(f"{file} is cut off: it lacks the data of {cut[0]}")
    return tensors


def _stored(name: str, file: Path, data_start: int, entry: dict[str, Any]) -> StoredTensor:
    """Raises ValueError, KeyError or TypeError for what no header of this format has."""
    dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if not isinstance(dtype, str) or not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise ValueError(f"{name} has no dtype, shape and offsets")
    known = DTYPES.get(dtype)
    if end < begin or (known is not None and end - begin != math.prod(shape) * known.itemsize):
        raise ValueError(f"{name}, {dtype} of shape {shape}, has data from {begin} to {end}")
    return StoredTensor(name, file, dtype, shape, data_start + begin, end - begin)


def _end_of(tensors: list[StoredTensor], start: int) -> int:
    """Where the tensors' data ends. Raises ValueError if it overlaps, or has gaps."""
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.num_bytes)):
        if tensor.offset != start:
            raise ValueError(f"the data of {tensor.name} does not begin where that of the tensor before it ends")
        start += tensor.num_bytes
    return start
