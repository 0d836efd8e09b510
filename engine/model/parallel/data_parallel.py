"""Nodes that compute attention each for requests of its own, and experts together for those of all.

    attention of the node's tokens -> rows of all nodes -> the rank's experts, for all rows -> sum over all ranks
    -> the node's rows -> attention of the next layer ...

Nodes step together: one that has no tokens still computes its experts for those of others. Nothing else couples them,
so each has a scheduler, a KV pool and an address of its own. After vLLM's and SGLang's data parallel attention with
expert parallel; rows are not padded with tokens, and a node without any runs nothing but its experts.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from engine.model.parallel.group import ONE_RANK, RankGroup


class DataParallel:
    """One rank, among all that divide blocks of experts. everyone: all ranks of all `num_nodes` nodes, numbered `rank
    in the node * num_nodes + node`, so that the ranks that are the same in each node, `peers`, are neighbours. All of
    them must make the same calls in the same order. Raises RuntimeError when one is lost."""

    def __init__(self, everyone: RankGroup, num_nodes: int = 1) -> None:
        assert everyone.size % num_nodes == 0
        self.everyone, self.num_nodes = everyone, num_nodes
        self.peers = everyone.part(everyone.rank // num_nodes * num_nodes, num_nodes)
        self._num_rows: list[int] = []
        self._meets = False

    def meet(self, num_tokens: int) -> bool:
        """Begin a step with the other nodes. num_tokens: of this one. False: no node has any, so there is no step.
        Before the first call, nodes tell each other their numbers in each `gather`, as a loading model needs it."""
        if self.num_nodes == 1:
            return num_tokens > 0
        self._meets, self._num_rows = True, self._told(num_tokens)
        return any(self._num_rows)

    def gather(self, x: Tensor) -> Tensor:
        """The rows of all nodes, in their order. x: this node's, [..., num_tokens, width], with leading dimensions
        of 1."""
        if self.num_nodes == 1:
            return x
        num_own, width = x.shape[-2:]
        if not self._meets:
            self._num_rows = self._told(num_own)
        padded = x.new_zeros(max(self._num_rows), width)
        padded[:num_own] = x.reshape(num_own, width)
        found = self.peers.all_gather(padded.view(-1)).view(self.num_nodes, -1, width)
        rows = torch.cat([found[node, :num] for node, num in enumerate(self._num_rows)])
        return rows.view(*x.shape[:-2], *rows.shape)

    def sum_own(self, x: Tensor) -> Tensor:
        """This node's rows of the sum over all ranks. x: a part of it, of the rows that `gather` gave; may be
        overwritten."""
        total = self.everyone.all_reduce(x)
        if self.num_nodes == 1:
            return total
        node = self.peers.rank
        first = sum(self._num_rows[:node])
        return total[..., first : first + self._num_rows[node], :]

    def _told(self, num_rows: int) -> list[int]:
        return self.peers.all_gather(torch.tensor([num_rows])).tolist()


ONE_NODE = DataParallel(ONE_RANK)


class Waves(Protocol):
    """When the nodes step: from the moment that one of them has a step until none of them has. The engine's thread
    only. The name is vLLM's."""

    @property
    def running(self) -> bool: ...

    def start(self) -> None:
        """Let all nodes know that there is a step, unless they do."""

    def end(self) -> None:
        """No node had one."""


class NoWaves:
    """Of a node that is alone."""

    running = False

    def start(self) -> None:
        """Nothing to do."""

    def end(self) -> None:
        """Nothing to do."""


NO_WAVES = NoWaves()
