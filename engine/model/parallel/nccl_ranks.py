"""Ranks of several nodes, with a GPU each: they gather and sum over NCCL, in their own communicators."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.model.parallel.gpus import GpuRanks, nccl_options
from engine.model.parallel.group import ONE_RANK, GlooRanks, RankGroup


class NcclRanks(GpuRanks):
    """Implements RankGroup like GpuRanks, but its collectives also take GPU tensors. Nodes do not map each other's
    memory: they may see different GPUs, or be on different hosts. The constructor waits for all ranks; raises
    RuntimeError."""

    def __init__(self, host: GlooRanks, device: torch.device) -> None:
        super().__init__(host, device)
        self._nccl: Any = dist.ProcessGroupNCCL(host.sub_store("nccl"), host.rank, host.size, nccl_options())
        self._nccl.eager_connect_single_device(device)

    def all_reduce(self, x: Tensor) -> Tensor:
        if not x.is_cuda:
            return super().all_reduce(x)
        x = x.contiguous()
        if x.numel():
            self._nccl.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        if not x.is_cuda:
            return super().all_gather(x)
        parts = x.new_empty(self.size, *x.shape)
        if x.numel():
            self._nccl._allgather_base(parts, x.contiguous()).wait()
        return parts.movedim(0, -2).flatten(-2)

    def broadcast(self, x: Tensor) -> None:
        if x.is_cuda:
            self._nccl.broadcast(x, 0).wait()
        else:
            super().broadcast(x)

    def part(self, size: int) -> RankGroup:
        if size == 1:
            return ONE_RANK
        own = self._host.part(size)
        if own is self._host:
            return self
        assert isinstance(own, GlooRanks)
        return NcclRanks(own, self.device)
