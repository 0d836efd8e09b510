"""The driver's launches and events do what Triton's and torch's do, on any thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from baton_kernels.cuda_driver import CudaError, CurrentDevice, DriverEvent, buffer_of, driver


def test_arguments_lie_where_the_driver_has_them() -> None:
    types, places = ["*i64", "i32", "*fp32", "i64"], [(0, 8), (8, 4), (16, 8), (24, 8)]
    packed = buffer_of(types, places).pack(1, 2, 3, 4)
    assert [int.from_bytes(packed[at : at + size], "little") for at, size in places] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("kind", "place"),
    [("*i64", (8, 4)), ("i32", (8, 8)), ("i32", (12, 4)), ("i64", (12, 4)), ("tensordesc<fp16>", (8, 8))],
)
def test_arguments_that_lie_elsewhere_are_refused(kind: str, place: tuple[int, int]) -> None:
    with pytest.raises(CudaError, match="a parameter of type"):
        buffer_of(["*i64", kind], [(0, 8), place])


@pytest.mark.gpu
def test_moves_and_events_work_on_a_thread_without_a_context() -> None:
    from baton_kernels.block_copy import kernel

    pool = torch.randint(0, 256, (9, 4096), dtype=torch.uint8, device="cuda")
    ids, out = torch.tensor([7, 2], device="cuda"), torch.zeros(2 * 4096, dtype=torch.uint8, device="cuda")
    stream: Any = torch.cuda.Stream()
    done, moves = DriverEvent(stream, blocking=False), kernel.PoolMoves(pool)
    moves.ready(True, ids, 2, 0, 4096, out, stream)()  # compiles
    stream.synchronize()
    (found,) = moves._found.values()
    assert found[1] is not None, "the kernel is launched by the driver"
    out.zero_()
    torch.cuda.synchronize()

    def move() -> None:
        assert not driver().has_context
        moves.ready(True, ids, 2, 0, 4096, out, stream)()
        with CurrentDevice(0):
            done.record(stream.cuda_stream)
        done.synchronize()

    with ThreadPoolExecutor(1) as thread:
        thread.submit(move).result()
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(done.query).result()
    assert torch.equal(out.view(2, 4096), pool[[7, 2]])


@pytest.mark.gpu
def test_a_stream_waits_for_an_event() -> None:
    first: Any = torch.cuda.Stream()
    second: Any = torch.cuda.Stream()
    event = DriverEvent(first, blocking=True)
    with torch.cuda.stream(first):
        torch.cuda._sleep(50_000_000)
    event.record(first.cuda_stream)
    event.make_wait(second.cuda_stream)
    assert not event.query()
    assert not second.query()
    second.synchronize()
    assert event.query()
