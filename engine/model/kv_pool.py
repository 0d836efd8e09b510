"""The memory of a node's KV blocks."""

from __future__ import annotations

import dataclasses
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from baton.layout import LayerKv
from baton_kernels.block_copy import copy_blocks
from baton_kernels.fp8_kv import elements_of, head_bytes
from engine.model.errors import UnsupportedModel


def require_served(layers: Sequence[LayerKv], model: str) -> None:
    """Raise UnsupportedModel unless this engine can keep the KV of these layers in one pool, where every layer has K
    and V of one shape for each token. A sliding window limits what is attended to, not the shape of what is kept."""
    for index, layer in enumerate(layers):
        if layer.state_bytes:
            raise UnsupportedModel(f"{model}: layer {index} keeps a state of {layer.state_bytes} bytes instead of KV")
        if layer.head_dim_v != layer.head_dim_k:
            widths = f"{layer.head_dim_k} and {layer.head_dim_v}"
            raise UnsupportedModel(f"{model}: K and V of layer {index} differ in width: {widths}")
    if len(shapes := {dataclasses.replace(layer, sliding_window=None) for layer in layers}) != 1:
        found = sorted((layer.num_kv_heads, layer.head_dim_k, layer.dtype) for layer in shapes)
        raise UnsupportedModel(f"{model}: layers' KV differ in shape: {found}")


def fresh_pages(num_bytes: int) -> Tensor:
    """Zeros, uint8, in pages that the system provides when they are first written: writing them all at the start would
    take half a second per GiB, or several seconds. Raises MemoryError."""
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"no {num_bytes} bytes: {error}") from error
    return torch.frombuffer(pages, dtype=torch.uint8)


class KvPool:
    """All KV blocks of a node's rank, in one tensor that this object owns.

    layers: the KV of each layer that the rank holds; `require_served` must accept them. groups: the model's KV groups
    (see `KvLayout`), as indices into `layers`; empty: one group. Raises MemoryError, or torch's error.

    tensor: [num_blocks, num_layers of a block, 2, num_kv_heads, block_size, head_dim]; for quantized layers
    [num_blocks, num_layers of a block, 2, num_kv_heads, bytes of a head's elements and scales], uint8. Block-major: a
    block is one contiguous piece to copy, send or checksum. Heads come before slots, so that a rank's heads are one
    slice. It starts as zeros. Reused blocks keep old KV in slots not yet written; on a CPU the runner clears a block
    before a chunk fills a part of it, since the reference attention needs finite values there.
    """

    def __init__(
        self,
        layers: tuple[LayerKv, ...],
        num_blocks: int,
        block_size: int,
        device: torch.device,
        groups: tuple[tuple[int, ...], ...] = (),
    ) -> None:
        self.layers = layers
        of_groups = groups or (tuple(range(len(layers))),)
        self.num_groups = len(of_groups)
        self._places = {  # for each layer, its group and its index among the layers of a block
            layer: (group, index) for group, members in enumerate(of_groups) for index, layer in enumerate(members)
        }
        self.num_blocks = num_blocks
        self.block_size = block_size
        one = layers[0]
        dims: tuple[int, ...] = (num_blocks, max(map(len, of_groups)), 2, one.num_kv_heads)
        dtype: torch.dtype = getattr(torch, one.dtype)
        if one.scale_dtype:
            dims, dtype = (*dims, head_bytes(block_size, one.head_dim_k)), torch.uint8
        else:
            dims = (*dims, block_size, one.head_dim_k)
        if device.type == "cpu":
            self.tensor = fresh_pages(math.prod(dims) * dtype.itemsize).view(dtype).view(dims)
        else:
            self.tensor = torch.zeros(dims, dtype=dtype, device=device)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one of the layers: views [num_blocks, num_kv_heads, block_size, head_dim]."""
        keys, values = self.tensor[:, self._places[index][1]].unbind(1)
        one = self.layers[0]
        if one.scale_dtype:
            keys, values = (elements_of(x, self.block_size, one.head_dim_k) for x in (keys, values))
        return keys, values

    def group_of(self, index: int) -> int:
        """The KV group in whose blocks the layer's KV is."""
        return self._places[index][0]

    def as_bytes(self) -> Tensor:
        """The same memory as [num_blocks, block_bytes], uint8."""
        return self.tensor.view(self.num_blocks, -1).view(torch.uint8)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination) each."""
        copy_blocks(self.tensor, pairs)

    def clear(self, blocks: list[int]) -> None:
        """Zero whole blocks."""
        self.tensor[blocks] = 0
