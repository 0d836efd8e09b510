"""Which signals end a process."""

import os
import signal

import pytest

from baton.process.signals import interrupted_by_signals, stop_signals


@pytest.mark.parametrize("ignored", [False, True])
def test_a_hangup_counts_unless_it_was_to_be_ignored(ignored):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        assert (signal.SIGHUP in stop_signals()) is not ignored
        assert {signal.SIGTERM, signal.SIGINT} <= {*stop_signals()}
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_command_with_something_to_tell_is_interrupted_by_each_stop_signal(number):
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(KeyboardInterrupt), interrupted_by_signals():
            os.kill(os.getpid(), number)
        assert signal.getsignal(number) is signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN)
        with interrupted_by_signals():
            os.kill(os.getpid(), number)
    finally:
        signal.signal(number, before)
