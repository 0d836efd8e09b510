"""A thread is woken for all that comes after it looked, and for nothing else."""

from __future__ import annotations

import threading
from collections import deque

from node.wakeup import Wakeup

DEADLINE_S = 20.0


def test_a_call_ends_one_wait() -> None:
    awake = Wakeup()
    for _ in range(3):
        awake.set()
    assert awake.wait(DEADLINE_S)
    assert not awake.wait(0.0), "three calls before a wait are one"


def test_what_was_called_before_a_look_is_forgotten() -> None:
    awake = Wakeup()
    awake.set()
    awake.clear()
    assert not awake.wait(0.001)


def test_nothing_is_left_when_many_post_at_once() -> None:
    awake, inbox = Wakeup(), deque[int]()
    num_threads, num_posts, taken = 4, 500, 0

    def post() -> None:
        for number in range(num_posts):
            inbox.append(number)
            awake.set()

    threads = [threading.Thread(target=post) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    while taken < num_threads * num_posts:
        awake.clear()
        while inbox:
            inbox.popleft()
            taken += 1
        if taken < num_threads * num_posts:
            assert awake.wait(DEADLINE_S), "a post was not noticed"
    for thread in threads:
        thread.join()
