"""Deadlines of transports that tests on a CPU need not wait out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest

from kv_transfer.transports.pair import ends
from kv_transfer.transports.pair import thread as pair_thread

DEATH_S = 0.1
"""Of a process that has died nothing writes any more, without a GPU. Tests wait until all is over, however soon."""


@contextmanager
def sooner_over() -> Iterator[None]:
    """What a broken connection granted is over after DEATH_S."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (ends, pair_thread):
            patch.setattr(module, "DEATH_S", DEATH_S)
        yield


@contextmanager
def giving_up() -> Iterator[None]:
    """A transport that is closed waits for nothing that was cut off: it has been seen that this does not end."""
    modules: list[ModuleType] = [pair_thread]
    if ucx := sys.modules.get("kv_transfer.transports.ucx.thread"):  # which is loaded only where it is used
        modules.append(ucx)
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, "_FINISH_S", 0.0)
        yield
