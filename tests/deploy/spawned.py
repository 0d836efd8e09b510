"""Python programs as processes, with what they say; `baton-up` among them."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Self

ROOT = Path(__file__).parents[2]
PATH = os.pathsep.join(str(ROOT / name) for name in ("", "proto", "kernels"))
START_S = 100.0
STOP_S = 60.0


def python_path() -> dict[str, str]:
    """This environment, with our import roots."""
    return {**os.environ, "PYTHONPATH": PATH}


class Process:
    """A run of Python. Use as a context; what still runs at its end is killed. `log`: all that it wrote so far."""

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            env=python_path(),
            cwd=ROOT,
        )
        self.log = ""
        self._news = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(STOP_S)
        self._reader.join(STOP_S)

    def _read(self) -> None:
        assert self._process.stdout
        with self._process.stdout as lines:
            for line in lines:
                with self._news:
                    self.log += line
                    self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()

    def wait_for(self, pattern: str, timeout_s: float = START_S) -> re.Match[str]:
        """The first match in what was written so far, or will be."""

        def match() -> re.Match[str] | None:
            return re.search(pattern, self.log, re.MULTILINE)

        with self._news:
            self._news.wait_for(lambda: match() or self._ended, timeout_s)
            found = match()
        assert found, f"no {pattern!r} in:\n{self.log}"
        return found

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait_end(self, timeout_s: float = STOP_S) -> int:
        code = self._process.wait(timeout_s)
        self._reader.join(timeout_s)
        return code


class Up(Process):
    """`baton-up` with these flags."""

    def __init__(self, *flags: str) -> None:
        super().__init__("-m", "deploy.up", *flags)

    def wait_ready(self) -> str:
        """Its base URL."""
        return self.wait_for(r"^ready (http://\S+) grpc \S+$")[1]

    def children(self) -> dict[str, int]:
        """Process ids by name, as in the command lines."""
        pid = self._process.pid
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        found = {}
        for child in children:
            if name := re.search(r"--node-id=([^\0]+)", Path(f"/proc/{child}/cmdline").read_text()):
                found[name[1]] = child
        return found


def wait_for_end(pid: int, timeout_s: float = STOP_S) -> None:
    """Until no process has this id; it may be anybody's child."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        end = select.poll()
        end.register(process, select.POLLIN)
        assert end.poll(timeout_s * 1e3), f"process {pid} goes on"
    finally:
        os.close(process)
