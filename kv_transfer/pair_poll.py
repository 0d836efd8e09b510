"""Who there is a connection with, and the epoll that waits for all of them."""

from __future__ import annotations

import select
from typing import Generic, Protocol, TypeVar

from kv_transfer.channel import Channel


class HasFileno(Protocol):
    def fileno(self) -> int: ...


class HasChannel(Protocol):
    @property
    def channel(self) -> Channel: ...


E = TypeVar("E", bound=HasChannel)
K = TypeVar("K")


class Ends(Generic[E]):
    """Owns the channels. `others` are waited for too, for reading."""

    def __init__(self, *others: HasFileno) -> None:
        self._ends: dict[int, E] = {}  # by descriptor
        self._masks: dict[int, int] = {}
        self._poll = select.epoll()
        for other in others:
            self._poll.register(other, select.EPOLLIN)

    def put(self, end: E) -> None:
        """Its channel is somebody's already, whom it succeeds, or new."""
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
        """(descriptor, mask) of what each connection wants and can have now."""
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
