"""Commands for a thread that sleeps on descriptors: none is lost, whoever closes the mailbox, and when."""

from __future__ import annotations

import functools
import select

from kv_transfer.transports.mailbox import Mailbox


def is_readable(mailbox: Mailbox) -> bool:
    return bool(select.select([mailbox], [], [], 0)[0])


def test_its_thread_is_woken_while_commands_wait_and_they_keep_their_order() -> None:
    mailbox, ran = Mailbox(), list[int]()
    assert not is_readable(mailbox)
    for number in range(3):
        mailbox.post(functools.partial(ran.append, number))
    assert is_readable(mailbox)
    assert mailbox
    mailbox.run()
    assert ran == [0, 1, 2]
    assert not is_readable(mailbox)
    mailbox.run()
    mailbox.close()


def test_a_thread_is_woken_once_for_what_is_posted_together() -> None:
    mailbox, ran = Mailbox(), list[int]()
    with mailbox.held():
        with mailbox.held():
            mailbox.post(functools.partial(ran.append, 0))
        mailbox.post(functools.partial(ran.append, 1))
        assert not is_readable(mailbox)
    assert is_readable(mailbox)
    mailbox.run()
    assert ran == [0, 1]
    assert not is_readable(mailbox)
    with mailbox.held():
        mailbox.post(functools.partial(ran.append, 2))
        mailbox.run()  # as a thread does that is awake
        assert ran == [0, 1, 2]
    assert not is_readable(mailbox)
    with mailbox.held():
        mailbox.post(functools.partial(ran.append, 3))
        mailbox.close()
        assert ran == [0, 1, 2, 3]


def test_a_command_may_post_another() -> None:
    mailbox, ran = Mailbox(), list[int]()
    mailbox.post(lambda: mailbox.post(lambda: ran.append(1)))
    mailbox.run()
    assert ran == [1]
    assert not is_readable(mailbox)
    mailbox.close()


def test_what_waits_when_it_is_closed_runs_then_and_what_comes_later_at_once() -> None:
    mailbox, ran = Mailbox(), list[int]()
    mailbox.post(lambda: ran.append(1))
    assert not ran
    mailbox.close()
    assert ran == [1]
    mailbox.post(lambda: ran.append(2))
    assert ran == [1, 2]
    assert mailbox.is_closed
