"""Commands from any thread to one that sleeps on descriptors."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable


class Mailbox:
    """`fileno` is readable while commands wait: the receiving thread sleeps on it, then calls `run`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._commands: deque[Callable[[], None]] = deque()
        self._closed = False
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._eventfd

    @property
    def is_closed(self) -> bool:
        return self._closed

    def __bool__(self) -> bool:
        """Whether commands wait."""
        return bool(self._commands)

    def post(self, command: Callable[[], None]) -> None:
        """Have the thread run `command`; once the mailbox is closed, run it on the calling thread."""
        with self._lock:
            if not self._closed:
                if not self._commands:
                    os.eventfd_write(self._eventfd, 1)
                self._commands.append(command)
                return
        command()

    def run(self) -> None:
        """Run the posted commands. Costs no system call if there are none, since a spinning thread calls it often."""
        while self._commands:
            with self._lock:
                command = self._commands.popleft()
                if not self._commands:
                    os.eventfd_read(self._eventfd)
            command()

    def close(self) -> None:
        """The thread ends: waiting commands run now, later ones on the threads that post them."""
        with self._lock:
            self._closed = True
            os.close(self._eventfd)
        while self._commands:
            self._commands.popleft()()
