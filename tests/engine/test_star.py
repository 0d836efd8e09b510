"""Rank 0's connections to the other ranks."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from engine.model.parallel.group import LOOPBACK
from engine.model.parallel.star import Star
from tests.engine.rank_threads import TIMEOUT_S

TENSORS = (
    torch.tensor(7),
    torch.tensor([True, False, True]),
    torch.randn(3, 5).bfloat16(),
    torch.randn(4).to(torch.float8_e4m3fn),
    torch.empty(0, 2),
    torch.arange(300_000),
)


def stars(size: int, timeout_s: float = TIMEOUT_S, store: HashStore | None = None) -> list[Star]:
    meeting = store or HashStore()
    with ThreadPoolExecutor(size) as pool:
        joining = [pool.submit(Star, meeting, rank, size, LOOPBACK, timeout_s, TIMEOUT_S) for rank in range(size)]
        return [each.result(TIMEOUT_S) for each in joining]


def test_tensors_of_any_shape_and_dtype_arrive_bit_by_bit_in_their_order() -> None:
    first, other = stars(2)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(lambda: [other.send(x, 0) for x in TENSORS])
        for x in TENSORS:
            arrived = torch.empty_like(x)
            first.receive(arrived, 1)
            assert torch.equal(arrived.view(-1).view(torch.uint8), x.view(-1).view(torch.uint8))
        sending.result(TIMEOUT_S)


def test_whoever_waits_for_a_rank_that_has_left_loses_it_at_once() -> None:
    first, *others = stars(3)
    others[0].send(torch.zeros(4), 0)
    del others[0]
    with pytest.raises(RuntimeError, match="another rank is lost: it has closed its connection"):
        first.receive(torch.zeros(5), 1)


def test_a_rank_that_says_nothing_is_waited_for_no_longer_than_asked() -> None:
    first, other = stars(2, timeout_s=0.05)
    with pytest.raises(RuntimeError, match="another rank is lost"):
        first.receive(torch.zeros(1), 1)
    del other


def test_a_stranger_is_no_rank() -> None:
    """It is at the port before the ranks are, and says what a rank would say but for the token."""
    store = Visited(bytes(16) + (1).to_bytes(4))
    first, other = stars(2, store=store)
    other.send(torch.tensor([8]), 0)
    said = torch.zeros(1, dtype=torch.int64)
    first.receive(said, 1)
    assert said.item() == 8
    with store.stranger:
        assert store.stranger.recv(1) == b""


def test_a_stranger_that_says_nothing_keeps_no_rank_waiting() -> None:
    store = Visited(b"")
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(stars, 3, store=store)
        try:
            assert len(joining.result(TIMEOUT_S / 10)) == 3
            assert store.stranger.recv(1) == b""
        finally:
            store.stranger.close()


class Visited(HashStore):
    """Beside those who read the port here, one connects that says something else."""

    stranger: socket.socket

    def __init__(self, says: bytes) -> None:
        super().__init__()
        self._says = says

    def set(self, key: str, value: str) -> None:
        port = int(value.split()[0])
        self.stranger = socket.create_connection((LOOPBACK, port), TIMEOUT_S)
        self.stranger.sendall(self._says)
        super().set(key, value)
