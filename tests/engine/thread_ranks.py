"""Ranks that are threads of this process and hand each other tensors.

Over gloo these threads would need more CPU time than all they compute: each connection has a thread that spins while
another one that holds its lock waits for a core, and takes ten milliseconds to end.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from engine.model.parallel.group import ONE_RANK, GlooRanks, RankGroup
from engine.model.parallel.star import Star

_TAGS = _TAG_OF_GLOO_RANKS, _STAR, _TO_ALL = 0, 1, 2


class _Letter:
    """A tensor on its way. `taken` is released when the receiver has it, or when it is lost."""

    def __init__(self, x: Tensor) -> None:
        _check_contiguous(x)
        self.x, self.taken, self.is_lost = x, threading.Lock(), False
        self.taken.acquire()

    def wait(self, timeout: timedelta) -> None:
        if not self.taken.acquire(timeout=timeout.total_seconds()) or self.is_lost:
            raise RuntimeError("the receiving rank is lost")


Box = SimpleQueue[_Letter | None]
"""The letters from one rank to another with the same tag, in their order. None: the sender has left."""


class Post:
    """What passes tensors between the threads of all ranks."""

    def __init__(self) -> None:
        self.store = HashStore()
        self._boxes: dict[tuple[str, int, int, int], Box] = {}
        self._gone: set[tuple[str, int]] = set()

    def box(self, group: str, sender: int, receiver: int, tag: int) -> Box:
        return self._boxes.setdefault((group, sender, receiver, tag), SimpleQueue())

    def send(self, letter: _Letter, group: str, sender: int, receiver: int, tag: int) -> None:
        box = self.box(group, sender, receiver, tag)
        box.put(letter)
        if (group, receiver) in self._gone:
            _lose(box)

    def leave(self, group: str, rank: int, size: int) -> None:
        """Whoever waits for this rank, or sends it something, has lost it."""
        self._gone.add((group, rank))
        for other in range(size):
            for tag in _TAGS:
                self.box(group, rank, other, tag).put(None)
                _lose(self.box(group, other, rank, tag))


def _check_contiguous(x: Tensor) -> None:
    """As gloo, which sends and receives bytes."""
    if not x.is_contiguous():
        raise RuntimeError("input tensor has to be contiguous")


def _lose(box: Box) -> None:
    while True:
        try:
            letter = box.get_nowait()
        except Empty:
            return
        if letter is not None:
            letter.is_lost = True
            letter.taken.release()


class _Receiving:
    def __init__(self, x: Tensor, box: Box) -> None:
        _check_contiguous(x)
        self._x, self._box = x, box

    def wait(self, timeout: timedelta) -> None:
        try:
            letter = self._box.get(timeout=timeout.total_seconds())
        except Empty:
            letter = None
        if letter is None:
            raise RuntimeError("the sending rank is lost")
        self._x.copy_(letter.x)
        letter.taken.release()


class _Done:
    def wait(self) -> None:
        """Nothing is left to wait for."""


class _ThreadGroup:
    """What GlooRanks uses of ProcessGroupGloo. As there, a send ends when the receiver has the tensor."""

    def __init__(self, post: Post, name: str, rank: int, size: int) -> None:
        self._post, self._name, self._rank = post, name, rank
        self._others = [other for other in range(size) if other != rank]

    def send(self, tensors: list[Tensor], to: int, tag: int) -> _Letter:
        letter = _Letter(tensors[0])
        self._post.send(letter, self._name, self._rank, to, tag)
        return letter

    def recv(self, tensors: list[Tensor], of: int, tag: int) -> _Receiving:
        return _Receiving(tensors[0], self._post.box(self._name, of, self._rank, tag))

    def allreduce(self, tensors: list[Tensor], options: Any) -> _Done:
        parts = [torch.empty_like(tensors[0]) for _ in range(1 + len(self._others))]
        self.allgather([parts], tensors, options)
        torch.sum(torch.stack(parts), 0, out=tensors[0])
        return _Done()

    def allgather(self, parts: list[list[Tensor]], tensors: list[Tensor], options: Any) -> _Done:
        sent = [self.send(tensors, other, _TO_ALL) for other in self._others]
        self._wait((self.recv([parts[0][other]], other, _TO_ALL) for other in self._others), options)
        self._wait(sent, options)
        parts[0][self._rank].copy_(tensors[0])
        return _Done()

    @staticmethod
    def _wait(started: Iterable[_Letter | _Receiving], options: Any) -> None:
        for each in started:
            each.wait(options.timeout)


class _ThreadStar(Star):
    """As `Star`."""

    def __init__(self, post: Post, name: str, rank: int, timeout: timedelta) -> None:
        self._post, self._name, self._rank, self._timeout = post, name, rank, timeout
        self._links = {}

    def send(self, x: Tensor, to: int) -> None:
        self._post.send(_Letter(x.clone()), self._name, self._rank, to, _STAR)

    def receive(self, x: Tensor, of: int) -> None:
        _Receiving(x, self._post.box(self._name, of, self._rank, _STAR)).wait(self._timeout)


class ThreadRanks(GlooRanks):
    """Must be closed when it ends or fails: the others then lose it, as they would a process."""

    def __init__(self, post: Post, rank: int, size: int, timeout_s: float, name: str = "all") -> None:
        self.rank, self.size, self.device = rank, size, torch.device("cpu")
        self._store, self._timeout = post.store, timedelta(seconds=timeout_s)
        self._post, self._name, self._parts = post, name, list[ThreadRanks]()
        self._group = _ThreadGroup(post, name, rank, size)
        self._star = _ThreadStar(post, name, rank, self._timeout)

    def part(self, size: int) -> RankGroup:
        if size == self.size:
            return self
        if size == 1:
            return ONE_RANK
        number, rank = divmod(self.rank, size)
        name = f"{self._name}, {size} of them, {number}"
        self._parts.append(ThreadRanks(self._post, rank, size, self._timeout.total_seconds(), name))
        return self._parts[-1]

    def close(self) -> None:
        self._post.leave(self._name, self.rank, self.size)
        for part in self._parts:
            part.close()
