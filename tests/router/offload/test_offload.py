"""What is done beside the event loop: others run meanwhile, and there is only so much of it."""

import asyncio
import sys
import threading
import time

import pytest

from baton.errors import Overloaded
from router.http.answers import dump_json
from router.http.parse import parse_json
from router.offload.threads import INLINE_SIZE, Offload, Pauses
from tests.router.tiny_tokenizer import tiny_tokenizer

BIG = "the quick brown fox 1 + 2 = 3 " * 10_000
LISTS = b"[" + b",".join([b"[]"] * 100_000) + b"]"
NUMBERS = list(range(300_000))


@pytest.mark.parametrize(
    "work",
    [
        lambda: tiny_tokenizer().encode(BIG, True),
        lambda: tiny_tokenizer().decode([7, 8, 9] * 200_000),
        lambda: parse_json(LISTS),
        lambda: dump_json(NUMBERS),
    ],
    ids=["encode", "decode", "parse_json", "dump_json"],
)
def test_others_run_while_a_thread_works(work):
    """With one call that keeps the interpreter's lock, this thread would get a turn or two."""
    tiny_tokenizer()
    thread = threading.Thread(target=work)
    turns, interval = 0, sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # so that short work of a fast processor has room for many turns
    try:
        thread.start()
        while thread.is_alive():
            time.sleep(0)
            turns += 1
    finally:
        sys.setswitchinterval(interval)
    assert turns > 8


@pytest.fixture
def offload():
    offload = Offload(max_size=100_000)
    yield offload
    offload.close()


async def test_short_work_is_done_at_once_and_long_work_elsewhere(offload):
    assert await offload.run(threading.get_ident, INLINE_SIZE) == threading.get_ident()
    assert await offload.run(threading.get_ident, INLINE_SIZE + 1) != threading.get_ident()


async def test_only_so_much_is_under_way(offload):
    hold = threading.Event()
    first = asyncio.create_task(offload.run(hold.wait, 60_000))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="60000 characters"):
        await offload.run(hold.wait, 50_000)
    first.cancel()  # its thread goes on, so it still counts
    await asyncio.gather(first, return_exceptions=True)
    with pytest.raises(Overloaded):
        await offload.run(hold.wait, 50_000)
    hold.set()
    async with asyncio.timeout(10):
        while offload.size:  # until its thread is done  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert await offload.run(lambda: 5, 100_000) == 5
    assert offload.size == 0


async def test_more_than_all_is_taken_alone(offload):
    assert await offload.run(lambda: 5, 200_000) == 5


async def test_long_work_leaves_threads_for_the_rest():
    offload, hold = Offload(max_size=10**9), threading.Event()
    long = [asyncio.create_task(offload.run(hold.wait, 10**6)) for _ in range(8)]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(offload.run(lambda: 5, 2000), 10) == 5
    hold.set()
    assert await asyncio.gather(*long) == [True] * 8
    offload.close()


async def test_long_work_waits_for_other_only_so_long(monkeypatch):
    monkeypatch.setattr("router.offload.threads._MAX_WAIT_S", 0.01)
    counted = []
    offload, hold = Offload(max_size=10**9, on_refused=counted.append), threading.Event()
    long = [asyncio.create_task(offload.run(hold.wait, 10**6)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match=r"long texts have kept others waiting for 0\.01 s") as refused:
        await offload.run(hold.wait, 10**6)
    assert counted == [refused.value]
    hold.set()
    assert await asyncio.gather(*long) == [True] * 2
    assert await offload.run(lambda: 5, 10**6) == 5
    offload.close()


async def test_pauses_let_others_run():
    others = 0

    async def other():
        nonlocal others
        while True:
            others += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    pause = Pauses()
    await pause()
    assert others == 0
    until = time.monotonic() + 0.02
    while time.monotonic() < until:
        await pause()
    task.cancel()
    assert others > 0
