"""Ranks with a GPU each, on one host: sums of few tokens through memory that all ranks of a stage map, all else over
NCCL.

Of 4096 bf16 values a row, two H100s sum 1 / 128 / 1024 rows over NCCL in 17 / 25 / 55 us; in one shot, each reading all
parts, in 9 / 17 / 63; in two shots, each summing a part of the rows, in 9 / 15 / 42.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store  # torch.distributed does not declare it as exported
from torch.distributed import _symmetric_memory as symmetric_memory

from engine.model.parallel.group import COLLECTIVE_TIMEOUT_S, ONE_RANK, GlooRanks, RankGroup

log = logging.getLogger(__name__)

ONE_SHOT_BYTES = 256 * 1024
TWO_SHOT_BYTES = 8 * 1024 * 1024
"""The largest sums that take one shot, and two."""
_SHARED_DTYPES = (torch.bfloat16, torch.float32)
_ALIGNMENT = 16
_SENDER, _RECEIVER = 0, 1
_PAIR_CTAS = 4
"""Of a pair's kernels, which spin from when they are queued until the other end has come: of an H200's 132 SMs few, and
yet with some 80 GB/s far more than stages send."""


class Pair(Protocol):
    """Two ranks, of which the first sends to the second, one tensor after the other."""

    def send(self, x: Tensor) -> Callable[[], None]:
        """See RankGroup."""

    def receive(self, x: Tensor) -> None:
        """See RankGroup."""


class NcclPair:
    """A communicator of its own for each direction: it has one stream, on which what waits for the other end would hold
    up what goes the other way. They meet at `store`; joining waits for the other."""

    def __init__(self, store: Store, rank: int, device: torch.device) -> None:
        os.environ["TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"] = "0"  # serialization is intended
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        options.is_high_priority_stream = True
        options.config.max_ctas = _PAIR_CTAS
        self._group: Any = dist.ProcessGroupNCCL(store, rank, 2, options)
        self._group.eager_connect_single_device(device)

    def send(self, x: Tensor) -> Callable[[], None]:
        """Begins when the current stream has come here, and runs beside what is queued on it afterwards. The wait is
        that of the stream which is current then, for whose work x can be given anew."""
        x = x.contiguous()
        work = self._group.send([x], _RECEIVER, 0)

        def wait() -> None:
            work.wait()
            x.data_ptr()  # kept until here: NCCL reads it meanwhile

        return wait

    def receive(self, x: Tensor) -> None:
        self._group.recv([x], _SENDER, 0).wait()


MakePair = Callable[[Store, int, torch.device], Pair]
"""Joins the pair that meets at that store, as its rank 0 or 1."""


class GpuRanks:
    """All ranks of a node. Implements RankGroup; its sums and gathers are of tensors of the CPU, over `host`: those of
    GPUs are made by the ranks that have parts of the same layers, see `part`. device: the rank's, current on this
    thread. Tensors there go from one rank to another over a pair, which these two make when they first need it."""

    def __init__(self, host: GlooRanks, device: torch.device, make_pair: MakePair = NcclPair) -> None:
        self.rank, self.size, self.device = host.rank, host.size, device
        self._host, self._make_pair = host, make_pair
        self._pairs: dict[tuple[int, int], Pair] = {}

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._host.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._host.all_gather(x)

    def broadcast(self, x: Tensor) -> None:
        self._host.broadcast(x)

    def minimum(self, number: int) -> int:
        return self._host.minimum(number)

    def send(self, x: Tensor, to: int) -> Callable[[], None]:
        return self._pair(self.rank, to).send(x)

    def receive(self, x: Tensor, of: int) -> None:
        self._pair(of, self.rank).receive(x)

    def part(self, first: int, size: int) -> RankGroup:
        return ONE_RANK if size == 1 else GpuPeers(self._host.part(first, size), self.device)

    def _pair(self, sender: int, receiver: int) -> Pair:
        ends = sender, receiver
        if (pair := self._pairs.get(ends)) is None:
            store = self._host.sub_store(f"from {sender} to {receiver}")
            pair = self._pairs[ends] = self._make_pair(store, ends.index(self.rank), self.device)
        return pair


class GpuPeers(GpuRanks):
    """Ranks that have parts of the same layers, with consecutive GPUs. One process can be in one such group. Joining
    waits for all of them; raises RuntimeError."""

    def __init__(self, host: RankGroup, device: torch.device) -> None:
        assert isinstance(host, GlooRanks)
        super().__init__(host, device)
        dist.init_process_group(
            "nccl",
            store=host.sub_store("gpus"),
            rank=host.rank,
            world_size=host.size,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
            device_id=device,
        )
        self._name = dist.group.WORLD.group_name  # type: ignore[union-attr]
        self._shared = self._share(device)

    def all_reduce(self, x: Tensor) -> Tensor:
        if not x.is_cuda:
            return self._host.all_reduce(x)
        if not x.numel():
            return x
        x = x.contiguous()
        if (shared := self._shared.get(x.dtype)) is None or x.nbytes > TWO_SHOT_BYTES or x.nbytes % _ALIGNMENT:
            dist.all_reduce(x)
            return x
        ops: Any = torch.ops.symm_mem
        own, shared = x.view(-1), shared[: x.numel()]
        if x.nbytes <= ONE_SHOT_BYTES:
            total: Tensor = ops.one_shot_all_reduce_copy(shared, own, "sum", self._name)
            return total.view(x.shape)
        shared.copy_(own)
        ops.two_shot_all_reduce_(shared, "sum", self._name)
        own.copy_(shared)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        if not x.is_cuda:
            return self._host.all_gather(x)
        parts = x.new_empty(self.size, *x.shape)
        if x.numel():
            dist.all_gather_into_tensor(parts, x.contiguous())
        return parts.movedim(0, -2).flatten(-2)

    def broadcast(self, x: Tensor) -> None:
        if x.is_cuda:
            dist.broadcast(x, 0)
        else:
            self._host.broadcast(x)

    def _share(self, device: torch.device) -> dict[torch.dtype, Tensor]:
        """For each dtype, the memory that all ranks map; none where GPUs cannot map each other's."""
        num_gpus, first = torch.cuda.device_count(), device.index - self.rank  # ranks have consecutive GPUs
        peers = [index for index in range(first, first + self.size) if index != device.index]
        can = all(index < num_gpus and torch.cuda.can_device_access_peer(device, index) for index in peers)
        if not self.minimum(int(can)):
            log.warning("no peer access between the GPUs of the ranks: all sums go over NCCL")
            return {}
        shared = {}
        for dtype in _SHARED_DTYPES:
            memory = symmetric_memory.empty(TWO_SHOT_BYTES // dtype.itemsize, dtype=dtype, device=device)
            symmetric_memory.rendezvous(memory, self._name)
            shared[dtype] = memory
        return shared
