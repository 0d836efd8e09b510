"""The ranks of a node, as each of them sees the others: sums, gathers, broadcasts, tensors from one to another."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    ReduceOp,
    Store,
)  # torch.distributed does not declare these as exported

from baton_kernels.all_reduce_rms_norm import PeerMemory

COLLECTIVE_TIMEOUT_S = 600.0
"""The bound for a rank that waits for another; that one died or hangs is noticed much earlier (`node.ranks.ranks`)."""
_CONNECT_TIMEOUT_S = 15.0
"""The bound for connecting ranks that are all there, which takes milliseconds. gloo holds Python's lock meanwhile, so
that nobody in this process could end the wait for one that is not there."""
LOOPBACK = "127.0.0.1"
_TAG = 0
"""The tag of all messages from one rank to another: they arrive in the order in which they were sent."""


class RankGroup(Protocol):
    """All ranks must call the same methods in the same order, with tensors of the same shape; `send` and `receive`, in
    pairs, only the two that take part. On a GPU the work is queued on the current stream. Raises RuntimeError when a
    rank is lost. device: of the tensors that are sent."""

    rank: int
    size: int
    device: torch.device
    peers: PeerMemory | None
    """Through which `all_reduce_rms_norm` sums; None: with `all_reduce`."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks; may overwrite x."""

    def start_all_reduce(self, x: Tensor) -> Callable[[], None]:
        """Start to overwrite x, which is contiguous, with the sum. It has it after the call that is returned, on a GPU
        for what that call's stream does next; other work goes on meanwhile."""

    def num_pieces(self, num_rows: int, row_bytes: int) -> int:
        """In how many pieces to compute and sum such parts, so that one is summed while the next is computed."""

    def norms_sum(self, num_rows: int, row_bytes: int) -> bool:
        """Whether a norm right after such a sum makes it, with `all_reduce_rms_norm`, rather than whoever computes the
        parts. The same on all ranks."""

    def all_gather(self, x: Tensor) -> Tensor:
        """The tensors of all ranks side by side: [..., n] to [..., size * n]."""

    def broadcast(self, x: Tensor) -> None:
        """Overwrite x with that of rank 0."""

    def minimum(self, number: int) -> int:
        """The smallest of all ranks' numbers."""

    def send(self, x: Tensor, to: int) -> Callable[[], None]:
        """Start to send x, which must not change before the call that is returned has waited for its end; on a GPU
        that call has the current stream wait."""

    def receive(self, x: Tensor, of: int) -> None:
        """Overwrite x with the next tensor that rank `of` sends to this one."""

    def part(self, first: int, size: int) -> RankGroup:
        """The group of ranks [first, first + size), of which this must be one; only these need to call."""


class OneRank:
    """The group of a node that has no other ranks."""

    rank = 0
    size = 1
    device = torch.device("cpu")
    peers: PeerMemory | None = None

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def start_all_reduce(self, x: Tensor) -> Callable[[], None]:
        raise RuntimeError("there are no other ranks")

    def num_pieces(self, num_rows: int, row_bytes: int) -> int:
        return 1

    def norms_sum(self, num_rows: int, row_bytes: int) -> bool:
        return True

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

    def part(self, first: int, size: int) -> RankGroup:
        return self


ONE_RANK = OneRank()


class GlooRanks:
    """Ranks on CPUs. They meet at `store`. host: this rank's address, at which the others reach it. Joining waits for
    all of them; raises RuntimeError."""

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

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._reduce(x, ReduceOp.SUM).wait()
        return x

    def start_all_reduce(self, x: Tensor) -> Callable[[], None]:
        work = self._reduce(x, ReduceOp.SUM)

        def wait() -> None:
            work.wait()
            x.data_ptr()  # kept until here: gloo writes to it meanwhile

        return wait

    def num_pieces(self, num_rows: int, row_bytes: int) -> int:
        return 1  # sums take the cores that products need

    def norms_sum(self, num_rows: int, row_bytes: int) -> bool:
        return True

    def all_gather(self, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        options = AllgatherOptions()
        options.timeout = self._timeout
        self._group.allgather([parts], [x.contiguous()], options).wait()
        return torch.cat(parts, dim=-1)

    def broadcast(self, x: Tensor) -> None:
        options = BroadcastOptions()
        options.rootRank, options.timeout = 0, self._timeout
        self._group.broadcast([x], options).wait()

    def minimum(self, number: int) -> int:
        told = torch.tensor([number], dtype=torch.int64)
        self._reduce(told, ReduceOp.MIN).wait()
        return int(told)

    def send(self, x: Tensor, to: int) -> Callable[[], None]:
        x = x.contiguous()
        work = self._group.send([x], to, _TAG)

        def wait() -> None:
            work.wait(self._timeout)
            x.data_ptr()  # kept until here: gloo reads it meanwhile

        return wait

    def receive(self, x: Tensor, of: int) -> None:
        self._group.recv([x], of, _TAG).wait(self._timeout)

    def part(self, first: int, size: int) -> RankGroup:
        if size == self.size:
            return self
        if size == 1:
            return ONE_RANK
        store = self.sub_store(f"ranks {first} to {first + size}")
        return GlooRanks(store, self.rank - first, size, self._timeout.total_seconds(), self._host)

    def sub_store(self, name: str) -> Store:
        """A store for a part of these ranks, by the name of its purpose."""
        return PrefixStore(name, self._store)

    def _reduce(self, x: Tensor, kind: Any) -> Any:
        options: Any = AllreduceOptions()
        options.reduceOp, options.timeout = kind, self._timeout
        return self._group.allreduce([x], options)


def _presence_key(rank: int) -> str:
    return f"rank {rank} is there"
