"""What tests of a node's ranks share: scenes that run as processes, whose ends they await, leaving none behind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from tests.e2e.cluster import wait_until
from tests.fork_server import ROOT, fork_server

PATIENCE_S = 60.0


class SceneProcess:
    """`python -m MODULE ARGUMENT...`, which writes into files of that name."""

    def __init__(self, module: str, arguments: Sequence[str], files: Path) -> None:
        self._out, self._err = (files.with_name(f"{files.name}.{what}") for what in ("out", "err"))
        roots = (ROOT, ROOT / "proto", ROOT / "kernels")
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, roots)), "OMP_NUM_THREADS": "1"}
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = fork_server().start(module, arguments, env=env, cwd=ROOT, stdout=out, stderr=err)

    @property
    def out(self) -> list[str]:
        return self._out.read_text().splitlines()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def wait_said(self, line: str) -> None:
        wait_until(lambda: None if line in self.out else f"it says {self.out} {self.err}", PATIENCE_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)


class Closable(Protocol):
    def close(self) -> None: ...


S = TypeVar("S", bound=Closable)


@contextmanager
def all_closed(make: Callable[[str], S]) -> Iterator[Callable[[str], S]]:
    """Gives what makes the scene of a case. All that were made are closed at the end."""
    with ExitStack() as stack:

        def start(case: str) -> S:
            scene = make(case)
            stack.callback(scene.close)
            return scene

        yield start


def wait_ended(pids: Iterable[int]) -> None:
    """Until no process of these runs."""
    wait_until(lambda: f"{left} run" if (left := [pid for pid in pids if _runs(pid)]) else None, PATIENCE_S)


def _runs(pid: int) -> bool:
    """Also if it is stopped. Not, if nobody has taken note of its end."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
