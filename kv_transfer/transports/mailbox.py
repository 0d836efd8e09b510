"""Commands from any thread to one that sleeps on descriptors."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Mailbox:
    """`fileno` is readable while commands wait: the receiving thread sleeps on it, then calls `run`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._commands: deque[Callable[[], None]] = deque()
        self._closed = False
        self._num_holds = 0
        self._is_signalled = False
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
                self._commands.append(command)
                self._signal()
                return
        command()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Do not wake the thread for what is posted until the end of this context. Each time that it is woken, it may
        take the interpreter from the thread that posts."""
        with self._lock:
            self._num_holds += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_holds -= 1
                self._signal()

    def _signal(self) -> None:
        if self._commands and not (self._num_holds or self._is_signalled or self._closed):
            self._is_signalled = True
            os.eventfd_write(self._eventfd, 1)

    def run(self) -> None:
        """Run the posted commands. Costs no system call if there are none, since a spinning thread calls it often."""
        while self._commands:
            with self._lock:
                command = self._commands.popleft()
                if self._is_signalled and not self._commands:
                    self._is_signalled = False
                    os.eventfd_read(self._eventfd)
            command()

    def close(self) -> None:
        """The thread ends: waiting commands run now, later ones on the threads that post them."""
        with self._lock:
            self._closed = True
            os.close(self._eventfd)
        while self._commands:
            self._commands.popleft()()
