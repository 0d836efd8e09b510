"""The connections of a transport's thread, the epoll that waits for them, and how long it waits."""

from __future__ import annotations

import select
from typing import Generic, Protocol, TypeVar

from kv_transfer.transports.pair.channel import Channel


class HasFileno(Protocol):
    def fileno(self) -> int: ...


class HasChannel(Protocol):
    @property
    def channel(self) -> Channel: ...


E = TypeVar("E", bound=HasChannel)
K = TypeVar("K")

_SPIN_S = 2e-3
"""How long to spin: a part that is stored directly into its slot takes 0.05 to 0.4 ms on an H200."""
_PAUSE_S = 20e-6
"""A pause after that. Linux makes it 75 us or more, a tenth of the time that 256 MiB take over NVLink."""
_RELAXED_PAUSE_S = 200e-6
_EAGER_S = 5e-3
_REST_S = 0.1


def pause_s(idle_s: float, is_urgent: bool, is_relaxed: bool = False) -> float:
    """How long to wait before polling operations whose progress wakes no thread, `idle_s` after their last progress.
    is_urgent: one of them takes only about as long as a kernel. Zero while such an operation may be running, so that no
    sleep adds to a request's latency; then briefly, then a tenth of the time since the last progress. is_relaxed: see
    `Transport.relax`."""
    if is_urgent and not is_relaxed and idle_s <= _SPIN_S:
        return 0.0
    pause = _RELAXED_PAUSE_S if is_relaxed else _PAUSE_S
    return pause if idle_s <= _EAGER_S else min(max(idle_s / 10, 1e-3), _REST_S)


class ChannelPoller(Generic[E]):
    """Owns the channels. Also waits for `others` to become readable."""

    def __init__(self, *others: HasFileno) -> None:
        self._ends: dict[int, E] = {}  # by descriptor
        self._masks: dict[int, int] = {}
        self._poll = select.epoll()
        for other in others:
            self._poll.register(other, select.EPOLLIN)

    def put(self, end: E) -> None:
        """Add the end, or replace the one that has its channel."""
        self._ends[end.channel.fileno()] = end

    def at(self, descriptor: int) -> E | None:
        return self._ends.get(descriptor)

    def of(self, kind: type[K]) -> list[K]:
        return [end for end in self._ends.values() if isinstance(end, kind)]

    def close(self, end: E) -> None:
        descriptor = end.channel.fileno()
        if self._ends.pop(descriptor, None) is not None and self._masks.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)
        end.channel.close()

    def close_all(self) -> None:
        for end in list(self._ends.values()):
            self.close(end)
        self._poll.close()

    def wait(self, timeout_s: float | None) -> list[tuple[int, int]]:
        """(descriptor, mask) of each connection that is ready to be read or written, as far as it waits for that."""
        for descriptor, end in self._ends.items():
            mask, before = end.channel.wants, self._masks.get(descriptor, 0)
            if mask == before:
                continue
            if not before:
                self._poll.register(descriptor, mask)
            elif not mask:
                self._poll.unregister(descriptor)
            else:
                self._poll.modify(descriptor, mask)
            self._masks[descriptor] = mask
            if not mask:
                del self._masks[descriptor]
        return self._poll.poll(timeout_s)
