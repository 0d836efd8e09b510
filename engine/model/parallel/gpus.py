"""Ranks with a GPU each: all-reduces of few tokens go through memory that all ranks of a stage map, if they are on one
host; all other collectives go over NCCL.

One kernel computes a sum together with the norm that follows it (`baton_kernels.all_reduce_rms_norm`), through its own
shared memory. Rows of long steps are divided among the ranks, and copy engines carry them (`sequence_parallel.py`).
torch's symmetric memory computes the other sums, such as that of the embedding. With rows of 4096 bf16 values, two
H100s sum 1 / 128 / 1024 rows in 17 / 25 / 55 us over NCCL; in 9 / 17 / 63 us in one shot, where each GPU reads all
parts; and in 9 / 15 / 42 us in two shots, where each GPU sums a part of the rows.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store  # torch.distributed does not declare it as exported
from torch.distributed import _symmetric_memory as symmetric_memory

from baton_kernels.all_reduce_rms_norm import NUM_PROGRAMS, PeerMemory
from baton_kernels.device import num_sms
from engine.model.parallel.copy_engines import CopyEngines
from engine.model.parallel.group import COLLECTIVE_TIMEOUT_S, ONE_RANK, GlooRanks, RankGroup
from engine.model.parallel.sequence_parallel import RowMemory, SequenceParallel

log = logging.getLogger(__name__)

ONE_SHOT_BYTES = 256 * 1024
TWO_SHOT_BYTES = 8 * 1024 * 1024
"""The largest sums that use one shot, and two shots."""
ROW_BYTES = 128 * 1024 * 1024
"""The longest steps whose rows are divided: 8192 rows of 8192 bf16 values, or 16384 of 4096."""
_SHARED_DTYPES = (torch.bfloat16, torch.float32)
_ALIGNMENT = 16
_TIMEOUT = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
_SENDER, _RECEIVER = 0, 1
_PAIR_CTAS = 4
"""SMs of a pair's kernels, which spin from when they are queued until the other end arrives: few of an H200's 132."""


class Pair(Protocol):
    """Two ranks, of which the first sends tensors to the second, in order."""

    def send(self, x: Tensor) -> Callable[[], None]:
        """See RankGroup."""

    def receive(self, x: Tensor) -> None:
        """See RankGroup."""


class NcclPair:
    """An NCCL communicator for one direction between two ranks. Each direction has its own: a communicator has one
    stream, on which a wait for the other end would hold up transfers in the other direction. The two ranks meet at
    `store`; the constructor waits for the other rank."""

    def __init__(self, store: Store, rank: int, device: torch.device) -> None:
        os.environ["TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"] = "0"  # serialization is intended
        options = nccl_options()
        options.config.max_ctas = _PAIR_CTAS
        self._group: Any = dist.ProcessGroupNCCL(store, rank, 2, options)
        self._group.eager_connect_single_device(device)

    def send(self, x: Tensor) -> Callable[[], None]:
        """Start to send x once the current stream has reached this point; work queued on that stream later runs
        meanwhile. The returned call makes the stream that is current then wait, so that its later work may overwrite
        x."""
        x = x.contiguous()
        work = self._group.send([x], _RECEIVER, 0)

        def wait() -> None:
            work.wait()
            x.data_ptr()  # keeps x alive until here: NCCL reads it meanwhile

        return wait

    def receive(self, x: Tensor) -> None:
        self._group.recv([x], _SENDER, 0).wait()


MakePair = Callable[[Store, int, torch.device], Pair]
"""Joins the pair that meets at the given store, as its rank 0 or 1."""


class GpuRanks:
    """All ranks of a node. Implements RankGroup. Its collectives take CPU tensors only and go over `host`; collectives
    of GPU tensors belong to the ranks that hold parts of the same layers, see `part`. device: the rank's GPU, current
    on this thread. GPU tensors go from one rank to another over a `Pair`, which the two ranks make at its first use."""

    peers: PeerMemory | None = None

    def __init__(self, host: GlooRanks, device: torch.device, make_pair: MakePair = NcclPair) -> None:
        self.rank, self.size, self.device = host.rank, host.size, device
        self._host, self._make_pair = host, make_pair
        self._pairs: dict[tuple[int, int], Pair] = {}

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._host.all_reduce(x)

    def norms_sum(self, num_rows: int, row_bytes: int) -> bool:
        return self._host.norms_sum(num_rows, row_bytes)

    def share_rows(self, width: int, dtype: torch.dtype) -> SequenceParallel | None:
        return None

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

    def part(self, size: int) -> RankGroup:
        if size == 1:
            return ONE_RANK
        kept = 0 if size == self.size else 2 * _PAIR_CTAS
        return GpuPeers(self._host.part(size), self.device, kept)

    def _pair(self, sender: int, receiver: int) -> Pair:
        ends = sender, receiver
        if (pair := self._pairs.get(ends)) is None:
            store = self._host.sub_store(f"from {sender} to {receiver}")
            pair = self._pairs[ends] = self._make_pair(store, ends.index(self.rank), self.device)
        return pair


class GpuPeers(GpuRanks):
    """Ranks that hold parts of the same layers, on consecutive GPUs. A process can be in only one such group. kept_sms:
    SMs that all-reduces leave free for the kernels of pairs to and from other stages. The constructor waits for all
    ranks; raises RuntimeError."""

    def __init__(self, host: RankGroup, device: torch.device, kept_sms: int = 0) -> None:
        assert isinstance(host, GlooRanks)
        super().__init__(host, device)
        dist.init_process_group(
            "nccl",
            store=host.sub_store("gpus"),
            rank=host.rank,
            world_size=host.size,
            timeout=_TIMEOUT,
            device_id=device,
            pg_options=nccl_options(),
        )
        self._name = dist.group.WORLD.group_name  # type: ignore[union-attr]
        self._shared: dict[torch.dtype, Tensor] = {}
        """For each dtype, the memory that all ranks map; empty if the GPUs cannot map each other's memory."""
        self._has_stages = kept_sms > 0
        self._rows: SequenceParallel | None = None
        if self._can_share(device):
            self._shared = {dtype: self._share(TWO_SHOT_BYTES, dtype)[0] for dtype in _SHARED_DTYPES}
            self._buffer, self.peers = self._make_peers(device, kept_sms)

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

    def norms_sum(self, num_rows: int, row_bytes: int) -> bool:
        if self._rows is not None and self._rows.active:
            return True
        return self.peers is not None and self.peers.can_take(num_rows, row_bytes)

    @torch.inference_mode(False)
    @torch.no_grad()
    def share_rows(self, width: int, dtype: torch.dtype) -> SequenceParallel | None:
        if self.peers is None or self._has_stages:
            return None
        if self._rows is None:
            x, received, flags = RowMemory.shapes(self.size, ROW_BYTES // (width * dtype.itemsize), width)
            shared = self._map(x, dtype), self._map(received, dtype), self._map(flags, torch.int32)
            memories = [RowMemory(*of_rank) for of_rank in zip(*shared, strict=True)]
            self._rows = SequenceParallel(self.rank, memories, CopyEngines(self.device))
        return self._rows

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

    def _can_share(self, device: torch.device) -> bool:
        """Whether all GPUs can map each other's memory."""
        num_gpus, first = torch.cuda.device_count(), device.index - self.rank  # a host's ranks use consecutive GPUs
        if self.minimum(first) != -self.minimum(-first):
            log.info("the ranks of a stage are on several hosts: all sums go over NCCL")
            return False
        peers = [index for index in range(first, first + self.size) if index != device.index]
        can = all(index < num_gpus and torch.cuda.can_device_access_peer(device, index) for index in peers)
        if not self.minimum(int(can)):
            log.warning("no peer access between the GPUs of the ranks: all sums go over NCCL")
            return False
        return True

    def _map(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        """A tensor of each rank, as this rank maps it; zeros."""
        memory = self._allocate(math.prod(shape), dtype).zero_()
        handle: Any = symmetric_memory.rendezvous(memory, self._name)
        first = (memory.data_ptr() - handle.buffer_ptrs[self.rank]) // dtype.itemsize  # the same on all ranks
        torch.cuda.synchronize(self.device)
        self.minimum(0)  # the memory of all is zeros
        own = memory.view(shape)
        return [own if rank == self.rank else handle.get_buffer(rank, shape, dtype, first) for rank in range(self.size)]

    def _share(self, num_bytes: int, dtype: torch.dtype) -> tuple[Tensor, list[int]]:
        """This rank's memory, and the addresses at which it maps the memory of each rank."""
        memory = self._allocate(num_bytes // dtype.itemsize, dtype)
        handle: Any = symmetric_memory.rendezvous(memory, self._name)
        start = memory.data_ptr() - handle.buffer_ptrs[self.rank]  # this offset is the same on all ranks
        return memory, [address + start for address in handle.buffer_ptrs]

    def _allocate(self, num_values: int, dtype: torch.dtype) -> Tensor:
        """Memory that other ranks can map: [num_values]. Returns when all ranks have theirs, so that none waits in
        torch's rendezvous for one that has not. If one lacks the memory, raises RuntimeError on all of them."""
        error = None
        try:
            memory = symmetric_memory.empty(num_values, dtype=dtype, device=self.device)
        except RuntimeError as own:
            error = own
        if self.minimum(int(error is None)):
            return memory
        raise error or RuntimeError(f"another rank has no room for {num_values} values that all ranks map")

    def _make_peers(self, device: torch.device, kept_sms: int) -> tuple[Tensor, PeerMemory]:
        """This rank's buffer, which must live as long as the PeerMemory, and the PeerMemory. Returns when the buffers
        of all ranks are empty."""
        buffer, addresses = self._share(PeerMemory.num_bytes(self.size), torch.uint8)
        buffer.fill_(0xFF)
        turns = torch.zeros(NUM_PROGRAMS, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)
        num_programs = self.minimum(min(NUM_PROGRAMS, num_sms(device) - kept_sms))
        return buffer, PeerMemory(self.rank, self.size, torch.tensor(addresses, device=device), turns, num_programs)


def nccl_options() -> Any:
    """Options of a communicator. NCCL's stream has high priority: a kernel that is ready gets the next SMs that a
    matmul gives up."""
    nccl: Any = dist
    options = nccl.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    options._timeout = _TIMEOUT
    return options
