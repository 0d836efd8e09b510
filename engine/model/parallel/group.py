"""Collectives among the ranks of a node: all-reduce, all-gather, broadcast, send and receive."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
)  # torch.distributed does not declare these as exported

from baton_kernels.all_reduce_rms_norm import PeerMemory
from engine.model.parallel.sequence_parallel import SequenceParallel
from engine.model.parallel.star import Star

COLLECTIVE_TIMEOUT_S = 600.0
"""How long a rank waits for another at most. `node.ranks.ranks` notices a rank that died or hangs much earlier."""
_CONNECT_TIMEOUT_S = 15.0
"""How long connecting may take once all ranks are there; it takes milliseconds. gloo holds the GIL meanwhile, so no
other thread could end a wait for a missing rank."""
LOOPBACK = "127.0.0.1"
_TAG = 0
"""Of messages from one rank to another: those with the same tag arrive in the order in which they were sent."""
_MOST_COMBINED_BYTES = 256 << 10
"""The most that rank 0 combines for all ranks, measured on two cores."""


class NormSums(Protocol):
    """Ranks whose partial results the next norm may sum. See RankGroup."""

    @property
    def peers(self) -> PeerMemory | None: ...

    def all_reduce(self, x: Tensor) -> Tensor: ...

    def norms_sum(self, num_rows: int, row_bytes: int) -> bool: ...

    def share_rows(self, width: int, dtype: torch.dtype) -> SequenceParallel | None: ...

    def minimum(self, number: int) -> int: ...


class RankGroup(Protocol):
    """All ranks must call the same methods in the same order, with tensors of the same shape; only `send` and `receive`
    are called just by the two ranks that take part. On a GPU, the work is queued on the current stream. Raises
    RuntimeError when a rank is lost. device: where the tensors to send and receive are."""

    rank: int
    size: int
    device: torch.device
    peers: PeerMemory | None
    """The memory through which `all_reduce_rms_norm` sums; None: it uses `all_reduce`."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over all ranks; may overwrite x."""

    def norms_sum(self, num_rows: int, row_bytes: int) -> bool:
        """Whether what follows such a sum computes it, instead of the module that computes the partial results: the
        norm right after it, with `all_reduce_rms_norm`; or in a step whose rows are divided (`share_rows`), their
        owners. The same on all ranks."""

    def share_rows(self, width: int, dtype: torch.dtype) -> SequenceParallel | None:
        """What divides the rows of steps among these ranks, made at the first call. width: of a row. None: they cannot
        map each other's memory, or gain nothing."""

    def all_gather(self, x: Tensor) -> Tensor:
        """The tensors of all ranks, concatenated along the last dimension: [..., n] to [..., size * n]."""

    def broadcast(self, x: Tensor) -> None:
        """Overwrite x with rank 0's."""

    def minimum(self, number: int) -> int:
        """The smallest number of all ranks."""

    def send(self, x: Tensor, to: int) -> Callable[[], None]:
        """Start to send x to rank `to`. The returned call waits for the end of the send, before which x must not
        change; on a GPU, it makes the current stream wait."""

    def receive(self, x: Tensor, of: int) -> None:
        """Overwrite x with the next tensor that rank `of` sends to this one."""

    def part(self, size: int) -> RankGroup:
        """The group of this rank and its neighbours, if the ranks are divided into groups of that size, in order; only
        ranks of this group need to call."""


class OneRank:
    """The group of a node that has no other ranks."""

    rank = 0
    size = 1
    device = torch.device("cpu")
    peers: PeerMemory | None = None

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def norms_sum(self, num_rows: int, row_bytes: int) -> bool:
        return True

    def share_rows(self, width: int, dtype: torch.dtype) -> SequenceParallel | None:
        return None

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def broadcast(self, x: Tensor) -> None:
        """Nothing to do."""

    def minimum(self, number: int) -> int:
        return number

    def send(self, x: Tensor, to: int) -> Callable[[], None]:
        raise RuntimeError(f"there is no rank {to}")

    def receive(self, x: Tensor, of: int) -> None:
        raise RuntimeError(f"there is no rank {of}")

    def part(self, size: int) -> RankGroup:
        return self


ONE_RANK = OneRank()


class GlooRanks:
    """Ranks on CPUs, connected by gloo. They meet at `store`. host: the address at which the others reach this rank.
    The constructor waits for all ranks; raises RuntimeError.

    Small tensors of all ranks go to rank 0 (`Star`), which combines them and sends the result to the others. That is
    one tensor from each of them and one back, while all send several in each round of gloo's ring, and each message
    wakes threads: on two cores, a sum of 16 KiB over four ranks takes 0.1 ms instead of 4.6, over two 0.03 instead of
    0.9. Large ones are better off in the ring (4 MiB over four ranks: 8 ms instead of 14)."""

    peers: PeerMemory | None = None

    def __init__(
        self, store: Store, rank: int, size: int, timeout_s: float = COLLECTIVE_TIMEOUT_S, host: str = LOOPBACK
    ) -> None:
        self.rank, self.size, self.device, self._host = rank, size, torch.device("cpu"), host
        self._store, self._timeout = store, timedelta(seconds=timeout_s)
        store.set(_presence_key(rank), "")
        store.wait([_presence_key(other) for other in range(size)], self._timeout)
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=_CONNECT_TIMEOUT_S)
        options._devices = [gloo.create_device(hostname=host)]
        self._group: Any = gloo(store, rank, size, options)
        self._star = Star(store, rank, size, host, timeout_s, _CONNECT_TIMEOUT_S)

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if x.nbytes <= _MOST_COMBINED_BYTES:
            return self._combine(x, x, lambda parts: sum(parts[1:], parts[0]))
        options = AllreduceOptions()
        options.timeout = self._timeout
        self._group.allreduce([x], options).wait()
        return x

    def norms_sum(self, num_rows: int, row_bytes: int) -> bool:
        return True

    def share_rows(self, width: int, dtype: torch.dtype) -> SequenceParallel | None:
        return None

    def all_gather(self, x: Tensor) -> Tensor:
        if x.nbytes * self.size <= _MOST_COMBINED_BYTES:
            like = x.new_empty(*x.shape[:-1], self.size * x.shape[-1])
            return self._combine(x.contiguous(), like, lambda parts: torch.cat(parts, dim=-1))
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        options = AllgatherOptions()
        options.timeout = self._timeout
        self._group.allgather([parts], [x.contiguous()], options).wait()
        return torch.cat(parts, dim=-1)

    def broadcast(self, x: Tensor) -> None:
        if self.rank:
            self._star.receive(x, 0)
        else:
            self._send_to_all(x)

    def minimum(self, number: int) -> int:
        own = torch.tensor([number], dtype=torch.int64)
        return int(self._combine(own, own, lambda parts: torch.stack(parts).amin(0)))

    def send(self, x: Tensor, to: int) -> Callable[[], None]:
        x = x.contiguous()
        work = self._group.send([x], to, _TAG)

        def wait() -> None:
            work.wait(self._timeout)
            x.data_ptr()  # keeps x alive until here: gloo reads it meanwhile

        return wait

    def receive(self, x: Tensor, of: int) -> None:
        self._group.recv([x], of, _TAG).wait(self._timeout)

    def part(self, size: int) -> RankGroup:
        if size == self.size:
            return self
        if size == 1:
            return ONE_RANK
        number, rank = divmod(self.rank, size)
        store = self.sub_store(f"part {number} of {size} ranks")
        return GlooRanks(store, rank, size, self._timeout.total_seconds(), self._host)

    def sub_store(self, name: str) -> Store:
        """A store for a part of these ranks, by the name of its purpose."""
        return PrefixStore(name, self._store)

    def _combine(self, x: Tensor, like: Tensor, combine: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """What rank 0 makes of the tensors of all ranks, in their order. It has the shape of `like`."""
        if self.rank:
            self._star.send(x, 0)
            combined = torch.empty_like(like)
            self._star.receive(combined, 0)
            return combined
        parts = [x, *(torch.empty_like(x) for _ in range(1, self.size))]
        for rank in range(1, self.size):
            self._star.receive(parts[rank], rank)
        combined = combine(parts)
        self._send_to_all(combined)
        return combined

    def _send_to_all(self, x: Tensor) -> None:
        for rank in range(1, self.size):
            self._star.send(x, rank)


def _presence_key(rank: int) -> str:
    return f"rank {rank} is there"
