"""The engine's thread: one delivery per turn, no polling, deadlines, engine calls, failures."""

import asyncio
import threading
import time
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest

from baton.messages import AttemptId, End, Load, Update
from node.events import Draining, SessionOpened
from node.loop import NodeLoop

WAIT_S = 20.0
UPDATE = Update(AttemptId(1, "r", 0), End())


class Role:
    def __init__(self):
        self.handled, self.turns, self.outputs = [], 0, []
        self.deadline, self.busy, self.error = None, 0, None
        self.idle, self.device_busy_since = True, None
        self.turned = threading.Semaphore(0)

    def handle(self, event, now):
        self.handled.append(event)
        self.outputs.append(UPDATE)

    def prepare(self, now): ...

    def compute(self, now):
        self.turns += 1
        if self.error:
            raise self.error
        self.busy = max(0, self.busy - 1)
        if self.deadline is not None and self.deadline <= now:
            self.deadline = None
        self.turned.release()
        return self.busy > 0

    def next_deadline(self):
        return self.deadline

    def take_outputs(self):
        outputs, self.outputs = self.outputs, []
        return outputs

    def end_turn(self): ...

    def load(self):
        return Load(num_running=self.turns // 100)

    def check_integrity(self): ...


@contextmanager
def started(role: Any):
    """A loop with the role, and what it delivers and why it failed."""
    turns, failures = asyncio.Queue(), asyncio.Queue()
    loop = NodeLoop()
    loop.start(role, [turns.put_nowait], failures.put_nowait)
    try:
        yield loop, turns, failures
    finally:
        assert loop.stop(WAIT_S)


async def take(queue) -> Any:
    async with asyncio.timeout(WAIT_S):
        return await queue.get()


async def test_all_events_that_wait_go_into_one_turn_and_come_out_as_one_delivery():
    role: Any = Role()
    loop, turns = NodeLoop(), asyncio.Queue()
    assert [loop.post(SessionOpened(i)) for i in range(3)] == [1, 2, 3]
    loop.start(role, [turns.put_nowait], print)
    turn = await take(turns)
    assert [event.epoch for event in role.handled] == [0, 1, 2]
    assert len(turn.outputs) == 3
    assert turn.num_handled == 3
    assert loop.stop(WAIT_S)
    assert turns.empty()


async def test_what_was_prepared_is_told_while_the_step_is_computed():
    class Slow(Role):
        told = threading.Event()

        def compute(self, now):
            assert not self.handled or self.told.wait(WAIT_S)
            return super().compute(now)

    role = Slow()
    with started(role) as (loop, turns, _):
        await take(turns)
        loop.post(Draining())
        assert len((await take(turns)).outputs) == 1
        role.told.set()


async def test_a_turn_ends_when_its_outputs_are_on_their_way():
    class Last(Role):
        left: ClassVar[list[int]] = []

        def compute(self, now):
            self.outputs += [UPDATE] * len(self.handled)  # what a step gives, beside what events gave
            return super().compute(now)

        def end_turn(self):
            self.left.append(len(self.outputs))

    role = Last()
    with started(role) as (loop, turns, _):
        loop.post(Draining())
        while not (await take(turns)).outputs:
            pass
    assert role.left
    assert not any(role.left)


async def test_it_sleeps_while_nothing_happens():
    role: Any = Role()
    with started(role) as (loop, turns, _):
        await take(turns)
        loop.post(Draining())
        await take(turns)
        for _ in range(5):  # turns that the start and the event caused
            if not await asyncio.to_thread(role.turned.acquire, timeout=0.3):
                return
    raise AssertionError("turns without a cause")


async def test_a_wake_up_and_a_deadline_make_a_turn():
    role: Any = Role()
    with started(role) as (loop, turns, _):
        await take(turns)
        assert role.turned.acquire(timeout=WAIT_S)
        role.deadline = time.monotonic() + 0.05
        loop.wake()
        for _ in range(2):  # the wake-up's, then the deadline's
            assert await asyncio.to_thread(role.turned.acquire, timeout=WAIT_S)
        assert role.deadline is None


async def test_a_busy_role_is_called_again_at_once():
    role: Any = Role()
    role.busy = 50
    with started(role):
        for _ in range(50):
            assert await asyncio.to_thread(role.turned.acquire, timeout=WAIT_S)
    assert role.turns >= 50


async def test_a_turn_that_hangs_is_a_failure():
    role: Any = Role()
    end = threading.Event()
    role.compute = lambda now: not end.wait(WAIT_S)
    failures = asyncio.Queue()
    loop = NodeLoop(turn_timeout_s=0.1)
    loop.start(role, [], failures.put_nowait)
    try:
        assert "not ended within 0.1 s" in str(await asyncio.wait_for(failures.get(), WAIT_S))
    finally:
        end.set()
        assert loop.stop(WAIT_S)


async def test_a_step_that_hangs_is_a_failure():
    role: Any = Role()
    failures = asyncio.Queue()
    role.device_busy_since = time.monotonic()  # and no event says that it ended
    loop = NodeLoop(turn_timeout_s=0.1)
    loop.start(role, [], failures.put_nowait)
    try:
        assert "not ended within 0.1 s" in str(await asyncio.wait_for(failures.get(), WAIT_S))
        assert role.turns < 10, "it did not sleep"
    finally:
        assert loop.stop(WAIT_S)


async def test_turns_that_end_in_time_are_no_failure_however_many():
    role: Any = Role()
    failures, go = asyncio.Queue(), threading.Semaphore(0)

    def compute(now):
        role.turned.release()
        return go.acquire(timeout=WAIT_S)  # busy: the next turn follows at once

    role.compute = compute
    loop = NodeLoop(turn_timeout_s=2.0)
    loop.start(role, [], failures.put_nowait)
    until = time.monotonic() + 2.5
    while time.monotonic() < until:
        assert await asyncio.to_thread(role.turned.acquire, timeout=WAIT_S)
        await asyncio.sleep(0.1)  # as long as a turn takes
        go.release()
    assert failures.empty()
    go.release()
    role.compute = lambda now: False
    assert loop.stop(WAIT_S)


async def test_a_failure_ends_the_thread_and_is_told(caplog):
    role: Any = Role()
    role.error = RuntimeError("odd")
    with started(role) as (_, _, failures):
        assert await take(failures) is role.error
    assert "engine thread failed" in caplog.text


async def test_a_listener_that_fails_is_a_failure_since_outputs_are_lost(caplog):
    error, failures, heard = RuntimeError("not sent"), asyncio.Queue(), []

    def fail(turn):
        raise error

    role: Any = Role()
    loop = NodeLoop()
    loop.start(role, [heard.append, fail], failures.put_nowait)
    try:
        assert await take(failures) is error
        assert heard
    finally:
        assert loop.stop(WAIT_S)
    assert "network side failed" in caplog.text


async def test_engine_calls_run_between_turns_and_after_the_events_before_them():
    role: Any = Role()
    seen = []
    with started(role) as (loop, _, _):
        loop.post(Draining())
        await asyncio.wrap_future(
            loop.run_engine_call(lambda: seen.append((threading.current_thread().name, role.handled)))
        )
        with pytest.raises(AssertionError, match="broken"):
            await asyncio.wrap_future(loop.run_engine_call(_fail))
    assert seen == [("engine", [Draining()])]


async def test_what_an_engine_call_returns_is_told_and_a_cancelled_one_is_not_run():
    role: Any = Role()
    go = threading.Event()
    with started(role) as (loop, turns, failures):
        await take(turns)
        busy = loop.run_engine_call(lambda: go.wait(WAIT_S))
        given_up = loop.run_engine_call(_fail)
        assert given_up.cancel()
        go.set()
        assert await asyncio.wrap_future(busy) is True
        assert await asyncio.wrap_future(loop.run_engine_call(lambda: 7)) == 7
        assert failures.empty()


def _fail():
    raise AssertionError("broken")
