"""Granted slots at peers that kernels of this process can store to, shared by the transport's thread and the mover."""

from __future__ import annotations

import threading
from functools import partial

from kv_transfer.async_operation import AsyncOperation, RemoteSlot
from kv_transfer.transports.pair.channel import Kind
from kv_transfer.transports.pair.ends import Grant


class GrantTable:
    """Grants by peer and tag.

    put --acquire--> stored to --[announce]--> --push--> (an operation of its link)
                       |                        |
                      cut ---------------------' --push_cut--> (over with the stores)
                       its link is gone; its connection stays until then
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._grants: dict[tuple[str, int], Grant] = {}
        self._cut: dict[tuple[str, int], Grant] = {}

    # ---- any thread ----

    def acquire_remote_slot(self, peer: str, tag: int, num_bytes: int, wait_s: float) -> RemoteSlot | None:
        """The granted slot, now the caller's alone to store its first `num_bytes`. None: it is not granted within
        `wait_s`, is too small, or cannot be reached."""
        key = peer, tag
        with self._changed:
            self._changed.wait_for(lambda: key in self._grants, wait_s)
            grant = self._grants.get(key)
            if grant is None or grant.target is None or num_bytes > grant.num_bytes:
                return None
            del self._grants[key]
            grant.placed = True
            return RemoteSlot(
                grant.target.memory, grant.target.signal, partial(self._announce, peer, tag, grant, num_bytes)
            )

    def _announce(self, peer: str, tag: int, grant: Grant, num_bytes: int, header: bytes) -> None:
        """Send BEGIN, unless the link was cut: then the connection's last messages are sent already."""
        with self._changed:
            if (peer, tag) not in self._cut:
                grant.announced = True
                grant.channel.send(Kind.BEGIN, tag, num_bytes, header)

    # ---- the transport's thread ----

    def put(self, peer: str, tag: int, grant: Grant) -> None:
        with self._changed:
            self._grants[peer, tag] = grant
            self._changed.notify_all()

    def withdraw(self, peer: str, tag: int) -> None:
        """Stop offering it."""
        with self._changed:
            self._grants.pop((peer, tag), None)

    def cut(self, peer: str, grants: dict[int, Grant]) -> dict[int, Grant]:
        """The link of these grants (by tag) is gone: stop offering them. Returns those that are placed."""
        with self._changed:
            for tag in grants:
                self._grants.pop((peer, tag), None)
            placed = {tag: grant for tag, grant in grants.items() if grant.placed}
            self._cut |= {(peer, tag): grant for tag, grant in placed.items()}
        return placed

    def push_cut(self, peer: str, tag: int, storing: AsyncOperation) -> bool:
        """The part of a cut grant is pushed: it is over when `storing` is. False: its link is not gone, or it was not
        placed."""
        with self._changed:
            grant = self._cut.pop((peer, tag), None)
        if grant is not None:
            grant.storing = storing
        return grant is not None
