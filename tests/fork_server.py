"""Processes of ours for tests, forked from one that has imported what takes seconds: torch, transformers, our modules.

    test process --asks--> fork server --forks--> the process, which becomes `python -m MODULE ...`

A start is then a matter of milliseconds. Beyond that nothing is shared: the process has its own pid, threads, sockets,
environment, exit code and native libraries that its module loads (UCX must not be loaded before a fork). The fork
server tells how it ended. Parallel workers of pytest share one fork server, which forks another for each of them.

Each is killed when its parent dies (`deploy.child`), so none outlives the test process.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

from baton.process.parent import die_with
from deploy import child

PRELOADED = (
    *("transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto"),
    *("prefill_node.node", "decode_node.node", "prefill_node.server", "decode_node.server", "router.server"),
    *("prefill_node.settings", "decode_node.settings", "router.supervisor", "uvicorn.lifespan.off", "pydantic.v1"),
    *("node.build", "node.structured_output.grammars", "kv_transfer.slot_copies", "kv_transfer.staging"),
    *("node.ranks.pool_links", "kv_transfer.transports.ucx.transport", "multiprocessing.queues"),
    *("node.run", "uvloop", "encodings.idna", "tests.made_once"),
)
NOT_BEFORE_A_FORK = ("ucxx", "libucxx")
NODE_FLAGS = "BATON_TEST_NODE_FLAGS"
"""Environment variable with the flags of all nodes of end-to-end tests, to run these on a GPU (CONTRIBUTING.md)."""
MAX_REQUEST_BYTES = 128 * 1024
ROOT = Path(__file__).resolve().parent.parent


class ForkedProcess:
    """`python -m MODULE ARGUMENT...` with an empty stdin; of `subprocess.Popen` what tests need."""

    def __init__(self, server: socket.socket) -> None:
        """`server`: what it says of this process alone; closed once the process has ended."""
        self._server = server
        said, fds, _, _ = socket.recv_fds(server, 64, 1)
        assert said, "the fork server has ended"
        (self._pidfd,) = fds
        self.pid = int(said)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._wait(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        code = self._wait(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Nothing happens if it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # the server has reaped it, and not said so yet
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _wait(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._server], [], [], timeout_s)[0]:
            said = self._server.recv(64)
            self.returncode = int(said) if said else -signal.SIGKILL  # the server was killed, and so it was
            self._server.close()
            os.close(self._pidfd)
        return self.returncode


class ForkServer:
    """As its client sees it. All that it forked end with the connection `asked`."""

    def __init__(self, asked: socket.socket) -> None:
        self._lock = threading.Lock()
        self._socket = asked

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        stdout: IO[bytes] | int,
        stderr: IO[bytes] | int,
    ) -> ForkedProcess:
        """`python -m MODULE ARGUMENT...`. `env`: all of its environment; what is read at imports has been read before.
        `stdout` and `stderr`: files, or their descriptors."""
        request = json.dumps({"module": module, "arguments": list(arguments), "env": dict(env), "cwd": str(cwd)})
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds = [theirs.fileno(), *(file if isinstance(file, int) else file.fileno() for file in (stdout, stderr))]
        with theirs, self._lock:
            socket.send_fds(self._socket, [request.encode()], fds)
        return ForkedProcess(ours)

    def close(self) -> None:
        self._socket.close()


class OwnForkServer(ForkServer):
    """It ends with the thread that made it, or at `close`."""

    def __init__(self, preloaded: Sequence[str] = PRELOADED) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = _start_server(theirs, preloaded)
        super().__init__(ours)

    def close(self) -> None:
        super().close()
        self._process.kill()
        self._process.wait()


class SharedForkServer:
    """For other processes, which connect to `address`. It ends with the thread that made it, or at `close`."""

    def __init__(self, preloaded: Sequence[str] = PRELOADED) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind("")  # Linux finds a name
            listener.listen()
            self.address = bytes(listener.getsockname())
            self._process = _start_server(listener, preloaded)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def connected(address: bytes) -> ForkServer:
    """A fork server of our own, from the shared one there."""
    asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    asked.connect(address)
    return ForkServer(asked)


def _start_server(asked: socket.socket, preloaded: Sequence[str]) -> subprocess.Popen[bytes]:
    """Asked over a connection, or listening for some."""
    plugins = ROOT / "tests" / "logits_processors_plugin"  # for all nodes, as if it were installed
    roots = (ROOT, ROOT / "proto", ROOT / "kernels", plugins)
    read_at_import = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, roots)), **read_at_import}
    command = [sys.executable, "-m", "deploy.child", str(os.getpid()), "tests.fork_server", str(asked.fileno())]
    return subprocess.Popen([*command, *preloaded], cwd=ROOT, env=env, pass_fds=[asked.fileno()])


def run_program(
    program: str, folder: Path, *, env: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run` returns of `python -c PROGRAM`, in a process that has imported torch. It becomes a module
    in `folder`, beside what it writes."""
    (folder / "program.py").write_text(program)
    with (folder / "stdout").open("w+b") as out, (folder / "stderr").open("w+b") as err:
        process = fork_server().start("program", [], env=env, cwd=folder, stdout=out, stderr=err)
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess("program", code, out.read().decode(), err.read().decode())


shared_address: bytes | None = None
"""Of the shared fork server, in a parallel worker."""


@functools.cache
def fork_server() -> ForkServer:
    """The one of this test process, to be asked for on its main thread."""
    server = OwnForkServer() if shared_address is None else connected(shared_address)
    atexit.register(server.close)
    return server


# ---- in the server ----


def main() -> None:
    asked = socket.socket(fileno=int(sys.argv[1]))
    is_shared = bool(asked.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    if is_shared:
        select.select([asked], [], [])  # perhaps nobody ever asks
    gc.disable()  # collections would take a third of the imports' time
    for name in sys.argv[2:]:
        importlib.import_module(name)
    _check_forkable()
    gc.collect()
    gc.freeze()  # or the first collection of each process would copy all that it looks at
    gc.enable()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # torch would take down its tables of operators at the end of each process, for 30 ms
    _serve(_next_client(asked) if is_shared else asked)


def _next_client(listener: socket.socket) -> socket.socket:
    """A connection, each in a fork of this process: it returns there alone."""
    shared = os.getpid()
    while True:
        connection, _ = listener.accept()
        with connection:
            if os.fork() == 0:
                listener.close()
                if not die_with(shared):
                    os._exit(1)
                return connection.dup()
        _reap()


@dataclass(frozen=True)
class _Child:
    pid: int
    pidfd: int  # readable once it has ended
    client: socket.socket

    def tell_end(self) -> None:
        _, status = os.waitpid(self.pid, 0)
        with contextlib.suppress(BrokenPipeError):  # nobody waits for it
            self.client.send(str(os.waitstatus_to_exitcode(status)).encode())

    def close(self) -> None:
        os.close(self.pidfd)
        self.client.close()


def _serve(requests: socket.socket) -> None:
    """Until the client is gone."""
    server, children = os.getpid(), dict[int, _Child]()
    while True:
        watched: list[socket.socket | int] = [requests, *children]
        readable, _, _ = select.select(watched, [], [])
        for pidfd in readable:
            if pidfd in children:
                child = children.pop(pidfd)
                child.tell_end()
                child.close()
        if requests not in readable:
            continue
        data, fds, _, _ = socket.recv_fds(requests, MAX_REQUEST_BYTES, 3)
        if not data:
            return
        if (pid := os.fork()) == 0:
            requests.close()
            for child in children.values():
                child.close()
            _become(server, json.loads(data), fds)
        for fd in fds[1:]:
            os.close(fd)
        child = _Child(pid, os.pidfd_open(pid), socket.socket(fileno=fds[0]))
        socket.send_fds(child.client, [str(pid).encode()], [child.pidfd])
        children[child.pidfd] = child


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _check_forkable() -> None:
    threads = os.listdir("/proc/self/task")  # noqa: PTH208 - names are enough
    loaded = [name for name in NOT_BEFORE_A_FORK if name in sys.modules]
    has_gpu = NODE_FLAGS in os.environ  # then torch, built for CUDA, may start a thread as it is imported
    assert len(threads) == 1 or has_gpu, f"{len(threads)} threads would not be there after a fork"
    assert not loaded, f"{loaded} must not be loaded before a fork"


def _become(server: int, request: dict[str, object], fds: Sequence[int]) -> NoReturn:
    connection, out, err = fds
    os.close(connection)
    for target, fd in enumerate((os.open(os.devnull, os.O_RDONLY), out, err)):
        os.dup2(fd, target)
        os.close(fd)
    env, arguments = request["env"], request["arguments"]
    assert isinstance(env, dict)
    assert isinstance(arguments, list)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(str(request["cwd"]))
    sys.path[0] = str(request["cwd"])  # where `python -m` looks first
    random.seed()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where nohup started the tests
    sys.argv = ["deploy.child", str(server), str(request["module"]), *arguments]
    _exit_with(_run())


def _run() -> int:
    """The exit code, and on stderr why, as Python's interpreter has them. But a Ctrl-C is left to that."""
    try:
        child.main()
    except SystemExit as end:
        if isinstance(end.code, int | None):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except Exception:  # noqa: BLE001 - whatever it is, it is told
        traceback.print_exc()
        return 1
    return 0


def _exit_with(code: int) -> NoReturn:
    """As an interpreter, but for its teardown: to take down all that was imported, whose pages the process shares until
    then, takes a quarter of a second."""
    threading._shutdown()  # type: ignore[attr-defined] # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    main()
