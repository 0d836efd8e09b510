"""`POST /debug/profile`: one at a time, of the engine's next steps, into a folder that the operator has set."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from baton.address import HostPort
from baton.errors import DeadlineExceeded, InternalError, InvalidRequest
from baton.telemetry import AdminGate, MetricsServer, new_registry
from engine.model.trace import TorchTrace
from node import preflight, profiling
from node.errors import StartupError
from node.profiling import ProfileRequest, Profiling
from node.settings import NodeSettings

WAIT_S = 20.0


class Noting:
    """A profiler that notes what is done with it."""

    def __init__(self, fails: str = "") -> None:
        self.notes: list[str] = []
        self._fails = fails

    def _note(self, name: str) -> None:
        self.notes.append(name)
        if name == self._fails:
            raise RuntimeError("no CUPTI")

    def start(self) -> None:
        self._note("start")

    def stop(self) -> None:
        self._note("stop")

    def write(self, path: Path) -> None:
        self._note("write")
        path.write_bytes(b"trace")


class Steps:
    """An engine's thread, whose steps end when the test says so."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self.watcher: Callable[[], None] | None = None
        self.watched = asyncio.Event()
        self._aio = asyncio.get_running_loop()

    def call(self, function: Callable[[], None]) -> Future[None]:
        return self._thread.submit(function)

    def watch(self, watcher: Callable[[], None] | None) -> None:
        self.watcher = watcher
        if watcher is not None:
            self._aio.call_soon_threadsafe(self.watched.set)

    async def end(self, number: int = 1) -> None:
        """Of steps, once a profile runs."""
        async with asyncio.timeout(WAIT_S):
            await self.watched.wait()
        for _ in range(number):
            await asyncio.wrap_future(self._thread.submit(lambda: self.watcher and self.watcher()))

    def close(self) -> None:
        self._thread.shutdown()


@pytest.fixture
async def steps():
    steps = Steps()
    yield steps
    steps.close()


def profiler(steps: Steps, folder: Path | None, trace: Noting) -> Profiling:
    return Profiling(folder, "decode-0", steps.call, steps.watch, lambda: trace)


async def test_so_many_steps_are_written_and_no_more(steps, tmp_path):
    trace = Noting()
    asked = asyncio.create_task(profiler(steps, tmp_path, trace).answer(b'{"steps": 3}'))
    await steps.end(5)
    status, text = await asked
    said = json.loads(text)
    [path] = tmp_path.iterdir()
    assert (status, said["path"], said["bytes"], said["steps"]) == (200, str(path), 5, 3)
    assert path.name.startswith("decode-0-")
    assert trace.notes == ["start", "stop", "write"]
    assert steps.watcher is None


async def test_one_at_a_time(steps, tmp_path):
    profiles = profiler(steps, tmp_path, Noting())
    first = asyncio.create_task(profiles.answer(b'{"steps": 1}'))
    async with asyncio.timeout(WAIT_S):
        await steps.watched.wait()
    assert (await profiles.answer(b"{}"))[0] == 409
    await steps.end()
    assert (await first)[0] == 200
    steps.watched.clear()
    again = asyncio.create_task(profiles.answer(b'{"steps": 1}'))
    await steps.end()
    assert (await again)[0] == 200
    assert len([*tmp_path.iterdir()]) == 2


async def test_what_there_is_at_the_deadline_is_written(steps, tmp_path):
    asked = asyncio.create_task(profiler(steps, tmp_path, Noting()).answer(b'{"steps": 9, "timeout": 0.2}'))
    await steps.end(2)
    assert json.loads((await asked)[1])["steps"] == 2


async def test_without_any_step_nothing_is_written(steps, tmp_path):
    trace = Noting()
    with pytest.raises(DeadlineExceeded, match="no step ended"):
        await profiler(steps, tmp_path, trace).answer(b'{"timeout": 0.01}')
    assert trace.notes == ["start", "stop"]
    assert not [*tmp_path.iterdir()]


async def test_a_profile_ends_although_its_client_is_gone(steps, tmp_path):
    trace = Noting()
    profiles = profiler(steps, tmp_path, trace)
    asked = asyncio.create_task(profiles.answer(b'{"steps": 1}'))
    async with asyncio.timeout(WAIT_S):
        await steps.watched.wait()
    asked.cancel()
    await steps.end()
    assert profiles._task
    await profiles._task
    assert trace.notes == ["start", "stop", "write"]


@pytest.mark.parametrize("fails", ["start", "stop", "write"])
async def test_a_profiler_that_fails_ends_nothing_but_the_profile(steps, tmp_path, fails):
    profiles = profiler(steps, tmp_path, Noting(fails))
    asked = asyncio.create_task(profiles.answer(b'{"steps": 1}'))
    if fails != "start":
        await steps.end()
    with pytest.raises(InternalError, match="no CUPTI"):
        await asked
    assert steps.watcher is None
    assert not [*tmp_path.iterdir()]
    assert profiles._task
    assert profiles._task.done()


async def test_an_engine_that_hangs_is_not_waited_for(steps, tmp_path, monkeypatch):
    monkeypatch.setattr(profiling, "_TURN_S", 0.01)
    profiles = Profiling(tmp_path, "n", lambda _: Future(), steps.watch, Noting)
    with pytest.raises(DeadlineExceeded, match="no turn"):
        await profiles.answer(b"")


@pytest.mark.parametrize("hangs", ["begin", "end"])
async def test_a_profile_that_was_given_up_ends_when_the_engine_goes_on(steps, tmp_path, monkeypatch, hangs):
    monkeypatch.setattr(profiling, "_TURN_S", 0.01)
    goes_on = threading.Event()
    trace = Noting()
    if hangs == "begin":
        monkeypatch.setattr(trace, "start", lambda: goes_on.wait(WAIT_S) and trace._note("start"))
    asked = asyncio.create_task(profiler(steps, tmp_path, trace).answer(b'{"timeout": 0.01}'))
    if hangs == "end":
        async with asyncio.timeout(WAIT_S):
            await steps.watched.wait()
        steps.call(lambda: goes_on.wait(WAIT_S))
    with pytest.raises(DeadlineExceeded, match="no turn"):
        await asked
    goes_on.set()
    await asyncio.wrap_future(steps.call(lambda: None))
    assert trace.notes == ["start", "stop"]
    assert steps.watcher is None


@pytest.mark.parametrize(
    "body",
    [
        *(b"{", b"[]", b"\xff", b'{"step": 1}', b'{"steps": 0}', b'{"steps": 1001}', b'{"steps": true}'),
        *(b'{"timeout": 0}', b'{"timeout": 46}', b'{"timeout": NaN}', b'{"timeout": null}', b'{"steps": "9"}'),
    ],
)
def test_what_is_asked_for_is_checked(body):
    with pytest.raises(InvalidRequest):
        ProfileRequest.parse(body)


def test_defaults():
    assert ProfileRequest.parse(b"") == ProfileRequest.parse(b"{}") == ProfileRequest(20, 30.0)


async def test_torch_s_trace_is_readable(steps, tmp_path):
    profiles = Profiling(tmp_path, "n", steps.call, steps.watch, TorchTrace)
    asked = asyncio.create_task(profiles.answer(b'{"steps": 1}'))
    async with asyncio.timeout(WAIT_S):
        await steps.watched.wait()
    await asyncio.wrap_future(steps.call(lambda: torch.ones(3).add_(1)))
    await steps.end()
    with gzip.open(json.loads((await asked)[1])["path"]) as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert "aten::add_" in names


def test_the_folder_is_looked_at_before_the_start(tmp_path):
    preflight._check_profile_dir(NodeSettings(model="m", profile_dir=tmp_path))
    with pytest.raises(StartupError, match="--profile-dir: "):
        preflight._check_profile_dir(NodeSettings(model="m", profile_dir=tmp_path / "none"))
    with pytest.raises(ValueError, match="--profile-dir: a simulated node"):
        NodeSettings(model="m", engine="simulated", profile="h200-8b", profile_dir=tmp_path)


# ---- over HTTP ----


@pytest.fixture
async def address(steps):
    profiles = profiler(steps, None, Noting())
    key = AdminGate()
    server = MetricsServer(
        HostPort("127.0.0.1", 0), new_registry("decode"), {}, {}, key, {"/debug/profile": profiles.answer}
    )
    yield server.address
    await asyncio.to_thread(server.close)


def ask(address: HostPort, method: str, data: bytes | None = None, **headers: str) -> tuple[int, str]:
    url = f"http://{address}/debug/profile"
    request = urllib.request.Request(url, data, {k.replace("_", "-"): v for k, v in headers.items()}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.parametrize(
    ("method", "data", "headers", "status", "says"),
    [
        ("POST", b"{}", {}, 403, "--profile-dir"),
        ("GET", None, {}, 405, "POST it"),
        ("POST", b"{}", {"Origin": "http://evil.example"}, 403, "web page"),
        ("POST", b" " * 5000, {}, 413, "4096"),
        ("POST", b"{}", {"Content_Length": "-1"}, 411, "Content-Length"),
    ],
)
async def test_what_is_no_profile(address, method, data, headers, status, says):
    code, text = await asyncio.to_thread(ask, address, method, data, **headers)
    assert (code, says in text) == (status, True)


async def test_it_is_an_operator_s(steps, tmp_path):
    (tmp_path / "key").write_text("operator")
    profiles = profiler(steps, tmp_path, Noting())
    server = MetricsServer(
        HostPort("127.0.0.1", 0),
        new_registry("decode"),
        {},
        {},
        AdminGate(tmp_path / "key"),
        {"/debug/profile": profiles.answer},
    )
    try:
        assert (await asyncio.to_thread(ask, server.address, "POST", b"{}"))[0] == 401
        wrong = await asyncio.to_thread(ask, server.address, "POST", b'{"steps": -1}', Authorization="Bearer operator")
        assert wrong == (400, "steps must be a whole number from 1 to 1000, not -1\n")
    finally:
        await asyncio.to_thread(server.close)
