"""A profile of the engine's next steps, by torch's profiler, as a Chrome trace file (`POST /debug/profile`).

The profiler is started and stopped on the engine's thread, between two turns, because it records the thread that starts
it. While no profile is recorded, this costs a step one comparison (`StepCounters.watch`).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Protocol

from baton.errors import DeadlineExceeded, InternalError, InvalidRequest

log = logging.getLogger(__name__)

DEFAULT_STEPS, MAX_STEPS = 20, 1000
DEFAULT_TIMEOUT_S, MAX_TIMEOUT_S = 30.0, 45.0
"""The whole answer must come within `baton.telemetry.http.ANSWER_S`, and two turns and the writing of a file take time
too."""
_TURN_S = 15.0
_SUFFIX = ".pt.trace.json.gz"


class Trace(Protocol):
    """A profiler. All but `write` is called on the engine's thread."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def write(self, path: Path) -> None: ...


Watch = Callable[[Callable[[], None] | None], None]
"""Sets what is called on the engine's thread at the end of each step; None: nothing."""


def torch_trace() -> Trace:
    from engine.model.trace import TorchTrace  # imports torch, which a simulated node does without

    return TorchTrace()


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """steps: how many to profile. timeout_s: when to stop even if there were fewer."""

    steps: int = DEFAULT_STEPS
    timeout_s: float = DEFAULT_TIMEOUT_S

    @classmethod
    def parse(cls, body: bytes) -> ProfileRequest:
        """`{"steps": 20, "timeout": 30}`, both optional. Raises InvalidRequest."""
        try:
            stated = json.loads(body) if body.strip() else {}
        except ValueError:
            raise InvalidRequest("the body is not JSON", "body") from None
        if not isinstance(stated, dict):
            raise InvalidRequest("the body must be an object", "body")
        if unknown := stated.keys() - {"steps", "timeout"}:
            raise InvalidRequest(f"there is no field {min(unknown)!r}: steps, timeout", "body")
        steps, timeout_s = stated.get("steps", DEFAULT_STEPS), stated.get("timeout", DEFAULT_TIMEOUT_S)
        if type(steps) is not int or not 1 <= steps <= MAX_STEPS:
            raise InvalidRequest(f"steps must be a whole number from 1 to {MAX_STEPS}, not {steps!r}", "steps")
        if type(timeout_s) not in (int, float) or not 0 < timeout_s <= MAX_TIMEOUT_S:
            raise InvalidRequest(f"timeout must be a number up to {MAX_TIMEOUT_S:g}, not {timeout_s!r}", "timeout")
        return cls(steps, float(timeout_s))


class Recording:
    """One profile. `begin` and `end` are for the engine's thread. `error`: what the profiler raised at its end. watch:
    sets what is called at the end of each step."""

    def __init__(self, trace: Trace, steps: int, watch: Watch) -> None:
        self.trace = trace
        self.num_steps = 0
        self.ended: Future[None] = Future()
        self.error: Exception | None = None
        self._steps = steps
        self._watch = watch
        self._is_on = False

    def begin(self) -> None:
        self.trace.start()
        self._is_on = True
        self._watch(self._stepped)

    def end(self) -> None:
        """Stop the profiler. Idempotent."""
        if not self._is_on:
            return
        self._is_on = False
        self._watch(None)
        try:
            self.trace.stop()
        except Exception as error:  # noqa: BLE001 - a profiler must not end the engine
            self.error = error
        self.ended.set_result(None)

    def _stepped(self) -> None:
        self.num_steps += 1
        if self.num_steps == self._steps:
            self.end()


class Profiling:
    """Answers `POST /debug/profile`, one at a time, on the metrics server's event loop.

    folder: where files are written; None: profiles are refused. name: of the node, in the files' names. call: runs a
    function on the engine's thread. make: a new profiler.
    """

    def __init__(
        self,
        folder: Path | None,
        name: str,
        call: Callable[[Callable[[], None]], Future[None]],
        watch: Watch,
        make: Callable[[], Trace] = torch_trace,
    ) -> None:
        self._folder = folder
        self._name = name
        self._call = call
        self._watch = watch
        self._make = make
        self._serial = itertools.count(1)
        self._task: asyncio.Task[dict[str, object]] | None = None

    async def answer(self, body: bytes) -> tuple[HTTPStatus, str]:
        """Raises InvalidRequest, DeadlineExceeded or InternalError."""
        if self._folder is None:
            return HTTPStatus.FORBIDDEN, "profiles are written nowhere: start the node with --profile-dir"
        wanted = ProfileRequest.parse(body)
        if self._task is not None and not self._task.done():
            return HTTPStatus.CONFLICT, "a profile is being made: wait for its end"
        self._task = asyncio.create_task(self._profile(wanted, self._folder))
        self._task.add_done_callback(_retrieve)  # its client may be gone by then
        return HTTPStatus.OK, json.dumps(await asyncio.shield(self._task))

    async def _profile(self, wanted: ProfileRequest, folder: Path) -> dict[str, object]:
        began = time.monotonic()
        recording = Recording(await asyncio.to_thread(self._make), wanted.steps, self._watch)
        try:
            await self._on_engine(recording.begin)
            await asyncio.wait({asyncio.wrap_future(recording.ended)}, timeout=wanted.timeout_s)
            await self._on_engine(recording.end)
            if recording.error is not None:
                raise recording.error
        except DeadlineExceeded:
            self._call(recording.end)  # when the engine goes on, since the next profile cannot begin beside this one
            raise
        except Exception as error:
            raise InternalError(f"the profiler failed: {error}") from error
        if not recording.num_steps:
            raise DeadlineExceeded(f"no step ended within {wanted.timeout_s:g} s: profile a node that has requests")
        path = folder / f"{self._name}-{time.strftime('%Y%m%dT%H%M%S')}-{next(self._serial)}{_SUFFIX}"
        num_bytes = await asyncio.to_thread(_write, recording.trace, path)
        log.info("profile path=%s steps=%d bytes=%d", path, recording.num_steps, num_bytes)
        seconds = round(time.monotonic() - began, 3)
        return {"path": str(path), "bytes": num_bytes, "steps": recording.num_steps, "seconds": seconds}

    async def _on_engine(self, function: Callable[[], None]) -> None:
        """Raises DeadlineExceeded if no turn ends in time."""
        call = self._call(function)
        try:
            async with asyncio.timeout(_TURN_S):
                await asyncio.wrap_future(call)
        except TimeoutError:
            call.cancel()
            raise DeadlineExceeded(f"no turn of the engine ended within {_TURN_S:g} s") from None


def _write(trace: Trace, path: Path) -> int:
    """Write the file; it gets its name once it is complete. Returns its size in bytes. Raises InternalError."""
    partial = path.with_name(f".{path.name}")  # torch compresses by the end of the name
    try:
        trace.write(partial)
        partial.replace(path)
        return path.stat().st_size
    except (OSError, RuntimeError) as error:
        partial.unlink(missing_ok=True)
        raise InternalError(f"--profile-dir: the trace cannot be written: {error}") from None


def _retrieve(task: asyncio.Task[dict[str, object]]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.info("profile failed error=%s", error)
