"""Functions that run in a process of their own: a native library that crashes or hangs ends only that."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

STOP_S = 5.0


class ChildFailed(Exception):
    """The function raised, or its process died or was too slow. The text gives the reason."""


class Child:
    """Runs `function(*args)`, which must be importable by name, in a new process."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(theirs, function, args), daemon=True)
        self._process.start()
        theirs.close()

    def result(self, timeout_s: float) -> Any:
        """What the function returned. Ends the process. Raises ChildFailed."""
        try:
            if not self._pipe.poll(timeout_s):
                raise ChildFailed(f"no answer within {timeout_s:g} s")
            answer = self._pipe.recv()
        except EOFError:
            self._process.join(STOP_S)
            raise ChildFailed(_death(self._process.exitcode)) from None
        finally:
            self.stop()
        if isinstance(answer, ChildFailed):
            raise answer
        return answer

    def stop(self) -> None:
        """End the process, whatever it does."""
        if self._process.is_alive():
            self._process.kill()
        self._process.join(STOP_S)
        self._pipe.close()


def call(function: Callable[P, R], timeout_s: float, *args: P.args, **kwargs: P.kwargs) -> R:
    """`function(*args)` in a process of its own. Raises ChildFailed."""
    assert not kwargs
    result: R = Child(function, *args).result(timeout_s)
    return result


def _run(pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        answer = function(*args)
    except Exception as error:  # noqa: BLE001 - the process's boundary: the parent raises it
        answer = ChildFailed(f"{type(error).__name__}: {error}")
    with contextlib.suppress(OSError):
        pipe.send(answer)
    pipe.close()
    os._exit(0)  # a native library's teardown could crash, and says nothing about a node


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        return f"the process died of {signal.Signals(-code).name}"
    return f"the process ended with exit code {code}"
