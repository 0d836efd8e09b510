"""The memory of a node's KV blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.layout import KvLayout
from baton_kernels.block_copy import copy_blocks


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one token's KV is for a model, as the probe saw it."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block: K and V of `block_size` tokens in all layers."""
        return self.num_layers * 2 * self.num_kv_heads * block_size * self.head_dim * self.dtype.itemsize


class KvPool:
    """All KV blocks of a node, in one tensor that this object owns.

    tensor: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]. Block-major: a block is one contiguous
    piece to copy, send or checksum. Heads are outside slots, so that a rank's heads are one slice. It starts as
    zeros, and slots after a block's last written one stay zero, so that whatever an attention reads is finite.
    """

    def __init__(self, shape: KvShape, num_blocks: int, block_size: int, device: torch.device) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.block_size = block_size
        dims = (num_blocks, shape.num_layers, 2, shape.num_kv_heads, block_size, shape.head_dim)
        self.tensor = torch.zeros(dims, dtype=shape.dtype, device=device)
        assert math.prod(dims[1:]) * shape.dtype.itemsize == shape.block_bytes(block_size)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer: views [num_blocks, num_kv_heads, block_size, head_dim]."""
        return self.tensor[:, index, 0], self.tensor[:, index, 1]

    def as_bytes(self) -> Tensor:
        """The same memory as [num_blocks, block_bytes], uint8."""
        return self.tensor.view(self.num_blocks, -1).view(torch.uint8)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination) each."""
        copy_blocks(self.tensor, pairs)

    def clear(self, blocks: list[int]) -> None:
        """Zero whole blocks."""
        self.tensor[blocks] = 0

    def layout(self, fingerprint: str) -> KvLayout:
        """How to describe a block to another node, for the model of that fingerprint."""
        return KvLayout(
            num_layers=self.shape.num_layers,
            num_kv_heads=self.shape.num_kv_heads,
            head_dim_k=self.shape.head_dim,
            head_dim_v=self.shape.head_dim,
            block_size=self.block_size,
            dtype=str(self.shape.dtype).removeprefix("torch."),
            head_start=0,
            head_end=self.shape.num_kv_heads,
            block_bytes=self.shape.block_bytes(self.block_size),
            fingerprint=fingerprint,
        )
