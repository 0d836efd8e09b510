"""Which signals end a process."""

import signal

import pytest

from baton.process.signals import stop_signals


@pytest.mark.parametrize("ignored", [False, True])
def test_a_hangup_counts_unless_it_was_to_be_ignored(ignored):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        assert (signal.SIGHUP in stop_signals()) is not ignored
        assert {signal.SIGTERM, signal.SIGINT} <= {*stop_signals()}
    finally:
        signal.signal(signal.SIGHUP, before)
