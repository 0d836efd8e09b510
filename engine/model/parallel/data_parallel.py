"""Data parallel nodes: each computes attention for its own requests, and all compute experts together.

    attention of the node's tokens -> rows of all nodes -> the rank's experts, for all rows -> sum over all ranks
    -> the node's rows -> attention of the next layer ...

Nodes step together: a node without tokens still computes its experts for the tokens of others. Nothing else couples
them, so each has a scheduler, a KV pool and an address of its own. After vLLM's and SGLang's data parallel attention
with expert parallelism. If a CUDA graph is large enough for every node, all replay it, also nodes without tokens. A
step that is launched op by op is not padded, and a node without tokens runs only its experts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from baton_kernels.all_reduce_rms_norm import PeerMemory
from engine.model.parallel.group import ONE_RANK, NormSums, RankGroup
from engine.model.parallel.sequence_parallel import SequenceParallel


class StepAgreement(NamedTuple):
    """What the nodes agreed on for a step. num_tokens_across_dp: the tokens of each node, 0 for one that only computes
    experts. needs: element by element, the maximum over the nodes with tokens."""

    num_tokens_across_dp: list[int]
    needs: list[int]


class DataParallel:
    """A rank's view of all ranks that divide blocks of experts. everyone: all ranks of all `num_nodes` nodes, numbered
    `rank in the node * num_nodes + node`, so that `peers`, which have the same number in each node, are neighbours. All
    of them must make the same calls in the same order. Raises RuntimeError when one is lost."""

    def __init__(self, everyone: RankGroup, num_nodes: int = 1) -> None:
        assert everyone.size % num_nodes == 0
        self.everyone, self.num_nodes = everyone, num_nodes
        self.peers = everyone.part(num_nodes)
        self._num_tokens_across_dp: list[int] = []
        self._steps = False
        self.exchange_s = 0.0
        """Total time of gathers and sums on a CPU."""

    def agree_on_step(self, num_tokens: int, needs: Sequence[int]) -> StepAgreement:
        """Agree on a step with the other nodes; if no node has tokens, there is no step. num_tokens: of this node.
        needs: what its CUDA graph needs, not negative. Only rank 0 of each node calls it, and passes the result on to
        the other ranks of its node."""
        own = torch.tensor([num_tokens, *needs])
        gathered = self.peers.all_gather(own).view(self.num_nodes, len(own))
        stepping = gathered * (gathered[:, :1] > 0)
        return StepAgreement(gathered[:, 0].tolist(), stepping[:, 1:].amax(0).tolist())

    def begin(self, num_tokens_across_dp: Sequence[int]) -> None:
        """Set how many tokens each node has in the steps from now on. Before the first call, for example while a model
        loads, each `gather` exchanges these numbers itself."""
        self._steps, self._num_tokens_across_dp = True, list(num_tokens_across_dp)

    def gather(self, x: Tensor) -> Tensor:
        """The rows of all nodes, in the order of the nodes. x: this node's rows, [..., num_tokens, width], with leading
        dimensions of 1."""
        if self.num_nodes == 1:
            return x
        began = time.perf_counter()
        rows = self._gathered(x)
        self.exchange_s += time.perf_counter() - began
        return rows

    def _gathered(self, x: Tensor) -> Tensor:
        num_own, width = x.shape[-2:]
        if not self._steps:
            self._num_tokens_across_dp = self.peers.all_gather(torch.tensor([num_own])).tolist()
        most, padded = max(self._num_tokens_across_dp), x.reshape(num_own, width)
        if num_own < most:
            padded = torch.cat([padded, x.new_zeros(most - num_own, width)])
        found = self.peers.all_gather(padded.reshape(-1)).view(self.num_nodes, most, width)
        rows = found.view(-1, width)
        if min(self._num_tokens_across_dp) < most:
            rows = torch.cat([found[node, :num] for node, num in enumerate(self._num_tokens_across_dp)])
        return rows.view(*x.shape[:-2], *rows.shape)

    @property
    def norm_sums(self) -> NormSums | None:
        """For norms that sum what `sum_own` would. None: with several nodes, each takes only its own rows of a sum."""
        return _BlockSums(self) if self.num_nodes == 1 else None

    def sum_own(self, x: Tensor) -> Tensor:
        """This node's rows of the sum over all ranks. x: this rank's partial results for the rows that `gather`
        returned; may be overwritten."""
        began = time.perf_counter()
        total = self.everyone.all_reduce(x)
        self.exchange_s += time.perf_counter() - began
        if self.num_nodes == 1:
            return total
        node = self.peers.rank
        first = sum(self._num_tokens_across_dp[:node])
        return total[..., first : first + self._num_tokens_across_dp[node], :]


class _BlockSums:
    """Implements NormSums for blocks of experts."""

    def __init__(self, ranks: DataParallel) -> None:
        self._ranks = ranks

    @property
    def peers(self) -> PeerMemory | None:
        return self._ranks.everyone.peers

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._ranks.sum_own(x)

    def norms_sum(self, num_rows: int, row_bytes: int) -> bool:
        return self._ranks.everyone.norms_sum(num_rows, row_bytes)

    def share_rows(self, width: int, dtype: torch.dtype) -> SequenceParallel | None:
        return self._ranks.everyone.share_rows(width, dtype)

    def minimum(self, number: int) -> int:
        return self._ranks.everyone.minimum(number)


ONE_NODE = DataParallel(ONE_RANK)


class Waves(Protocol):
    """When the nodes step: a wave begins when one of them has a step, and ends when all have joined it. The engine's
    thread only. The name is vLLM's, where a wave lasts until no node has a step."""

    @property
    def running(self) -> bool: ...

    def start(self) -> None:
        """Tell all nodes that there is a step, unless they know."""

    def end(self) -> None:
        """All nodes have joined the wave."""


class NoWaves:
    """The waves of a single node."""

    running = False

    def start(self) -> None:
        """Nothing to do."""

    def end(self) -> None:
        """Nothing to do."""


NO_WAVES = NoWaves()
