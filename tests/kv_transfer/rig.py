"""Nodes of a KV transfer, for tests: in this process over `memory`, or each in a process of its own.

A `Rig` starts nodes of one kind (`rig_node.Node`, or `rank_node.RankNode` of several ranks) and stops them; the handles
it gives have `call(method, *args)` for either kind.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from kv_transfer import create, staging_for
from kv_transfer.staging import Staging
from kv_transfer.transports.memory import MemoryHub, MemoryTransport
from kv_transfer.transports.pair.transport import PairTransport
from tests.kv_transfer.deadlines import giving_up, sooner_over
from tests.kv_transfer.leftovers import GPU_SLACK, NOTHING, WAIT_S, Resources, left_over, orphans
from tests.kv_transfer.ordered import ordered_carrier
from tests.kv_transfer.rank_node import RECEIVERS, SENDERS, RankNode
from tests.kv_transfer.rig_node import DEADLINE_S, ROLES, Node

UCX_TLS = {"ucx-shm": "posix,sysv,cma,self", "ucx-tcp": "tcp,self", "ucx": ""}  # empty: what UCX chooses
UCX_TLS_CUDA = {"ucx": "", "ucx-tcp": "tcp,self,cuda_copy"}
KINDS = ("memory", *UCX_TLS, "ipc", "nixl", "ordered")  # ordered stands in for NCCL
KINDS_CUDA = (*UCX_TLS_CUDA, "ipc", "nixl", "nccl")


class LocalNode:
    """A node over `memory`."""

    def __init__(self, hub: MemoryHub, name: str, **options: Any) -> None:
        self.name = name
        self._hub = hub
        self._node = _node(lambda staging, wake: MemoryTransport(hub, name, staging, wake), **options)

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self._node, method)(*args)

    def start(self, method: str, *args: Any) -> Callable[[], Any]:
        result = self.call(method, *args)
        return lambda: result

    def kill(self) -> None:
        self._hub.kill(self.name)

    def stop(self, is_clean: bool) -> None:
        self._node.close()


class Host:
    """A process that runs nodes of one kind, one after the other."""

    _idle: ClassVar[dict[tuple[str, str], list[Host]]] = {}

    def __init__(self, kind: str, device: str) -> None:
        context = multiprocessing.get_context("forkserver")
        self._key = (kind, device)
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, kind, device), daemon=True)
        self.process.start()
        theirs.close()

    @classmethod
    def take(cls, kind: str, device: str) -> Host:
        idle = cls._idle.get((kind, device))
        return idle.pop() if idle else cls(kind, device)

    def give_back(self) -> None:
        self._idle.setdefault(self._key, []).append(self)

    def end(self) -> None:
        """The process ends by itself when it can."""
        if self.process.is_alive():
            self.pipe.send(None)
            self.process.join(DEADLINE_S)
        code = self.process.exitcode
        self.kill()
        self.process.close()
        self.pipe.close()
        assert code in (0, -signal.SIGKILL), f"exit code {code}"

    def kill(self) -> None:
        self.process.kill()
        self.process.join(DEADLINE_S)

    @classmethod
    def end_all(cls) -> None:
        for hosts in cls._idle.values():
            while hosts:
                hosts.pop().end()


def _is_stopped(pid: int) -> bool:
    states = {path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")}
    return states == {"T"}


class RemoteNode:
    """A node in a process of its own. `start` and the constructor do not wait for it."""

    def __init__(self, kind: str, name: str, device: str, **options: Any) -> None:
        self.name = name
        self._host = Host.take(kind, device)
        self.pid = self._host.process.pid
        self._host.pipe.send(options | {"device": device})
        self._starting = True

    def call(self, method: str, *args: Any) -> Any:
        return self.start(method, *args)()

    def start(self, method: str, *args: Any) -> Callable[[], Any]:
        if self._starting:
            self._starting = False
            self._result()
        self._host.pipe.send((method, args))
        return self._result

    def signal(self, number: int) -> None:
        """One that is to stop has stopped afterwards, with all of its threads."""
        assert self.pid is not None
        os.kill(self.pid, number)
        deadline = time.monotonic() + DEADLINE_S
        while number == signal.SIGSTOP and not _is_stopped(self.pid):
            assert time.monotonic() < deadline
            os.sched_yield()

    def peek(self, address: int) -> int:
        """A byte of its memory, also while it is stopped."""
        with Path(f"/proc/{self.pid}/mem").open("rb", buffering=0) as memory:
            return os.pread(memory.fileno(), 1, address)[0]

    def kill(self) -> None:
        self._host.kill()

    def stop(self, is_clean: bool) -> None:
        """Close the transport; `is_clean`: no thread or descriptor may be left of it."""
        try:
            if not self._host.process.is_alive():
                return
            self.signal(signal.SIGCONT)
            left = self.start("stop", is_clean)()
            assert left is None or not is_clean, left
            if left is None:
                self._host.give_back()
                return
        except BaseException:
            self._host.kill()
            raise
        self._host.end()

    def _result(self) -> Any:
        assert self._host.pipe.poll(DEADLINE_S + 10), f"no answer from {self.name}"
        try:
            result = self._host.pipe.recv()
        except EOFError:
            self._host.process.join(DEADLINE_S)
            raise AssertionError(f"{self.name} died, exit code {self._host.process.exitcode}") from None
        if isinstance(result, BaseException):
            raise result
        return result


class Rig:
    """Starts nodes of one kind. `link` connects each with each.

    on_gpu: slots and pools are on GPUs, senders' on the first and receivers' on the second where there are two.
    """

    def __init__(self, kind: str, on_gpu: bool = False) -> None:
        self.kind = kind
        self.on_gpu = on_gpu
        self.cuts = False
        """Set by tests that disconnect with a message half-way or never answered: its endpoint, and so its worker with
        a thread and descriptors, stays until the process exits (it is not closed, or ucxx 0.52 does not free it)."""
        self._hub = MemoryHub(auto=True)
        self._serial = itertools.count(1)
        self._nodes: list[LocalNode | RemoteNode] = []

    def node(self, role: str, **options: Any) -> Any:
        name = f"{role}-{next(self._serial)}"
        node: LocalNode | RemoteNode
        if self.kind == "memory":
            node = LocalNode(self._hub, name, role=role, **options)
        else:
            node = RemoteNode(self.kind, name, self._device(role), role=role, **options)
        self._nodes.append(node)
        return node

    def _device(self, role: str) -> str:
        if not self.on_gpu:
            return "cpu"
        num_raw = sum(node.name.startswith("raw") for node in self._nodes)
        index = {"sender": 0, "receiver": 1, "raw": num_raw}[role]
        return f"cuda:{index % torch.cuda.device_count()}"

    def link(self, *nodes: Any) -> None:
        for one, other in itertools.combinations(nodes, 2):
            address = other.call("info")
            waiting = one.start("connect", other.name, address)
            if self.kind == "memory":
                other.call("connect", one.name, one.call("info"))
            else:
                waiting()
                other.call("connect", one.name, one.call("info"))

    def stop(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._check_shared_memory)
            for node in self._nodes:
                stack.callback(node.stop, not self.cuts)

    def _check_shared_memory(self) -> None:
        """No segment may be left that nobody uses; those of killed processes too."""
        pids = {node.pid for node in self._nodes if isinstance(node, RemoteNode)}
        assert not (left := orphans(pids)), left


def _serve(pipe: Any, kind: str, device: str) -> None:
    """A host's process: a node's options in, then calls until "stop", with whether that must be clean; None ends it."""
    name = kind.partition("-")[0]
    tls = (UCX_TLS if device == "cpu" else UCX_TLS_CUDA).get(kind)
    os.environ |= {"UCX_WARN_UNUSED_ENV_VARS": "n", **({"UCX_TLS": tls} if tls else {})}
    torch.set_num_threads(1)
    faulthandler.enable()
    _keep_open(name, device)
    gc.freeze()  # or each look at what a node left behind would go through all of torch, for 0.1 s
    before, slack = Resources.now(), NOTHING if device == "cpu" else GPU_SLACK
    with sooner_over() if device == "cpu" else contextlib.nullcontext():
        _serve_nodes(pipe, name, before, slack)


def _serve_nodes(pipe: Any, name: str, before: Resources, slack: Resources) -> None:
    while (options := pipe.recv()) is not None:
        node = _node(partial(_create, name), stage=partial(staging_for, name), **options)
        pipe.send(None)
        while (call := pipe.recv())[0] != "stop":
            try:
                pipe.send(getattr(node, call[0])(*call[1]))
            except Exception as error:  # noqa: BLE001 - the test's to judge
                pipe.send(error)
        (is_clean,) = call[1]
        with contextlib.nullcontext() if is_clean else giving_up():
            node.close()
        del node
        pipe.send(left_over(before, slack, WAIT_S if is_clean else 0.0))


def _keep_open(name: str, device: str) -> None:
    """What a native library opens once in a process is not the transport's."""
    if device != "cpu":
        torch.cuda.set_device(device)
        stage = partial(staging_for, name)
        warm = [Node(partial(_create, name), role, device=device, stage=stage) for role in ROLES]
        for node in warm:
            node.close()
    if name == "ucx":
        import kv_transfer.transports.ucx.thread  # noqa: F401
    elif name in ("ordered", "nccl"):
        TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def _node(make: Callable[[Staging, Callable[[], None]], Any], role: str, **options: Any) -> Node | RankNode:
    return (RankNode if role in (SENDERS, RECEIVERS) else Node)(make, role, **options)


def _create(name: str, staging: Staging, wake: Callable[[], None]) -> Any:
    if name == "ordered":
        return PairTransport(staging, wake, ordered_carrier())
    return create(name, staging, wake)


@contextlib.contextmanager
def rig_of(kind: str, on_gpu: bool = False) -> Iterator[Rig]:
    rig = Rig(kind, on_gpu)
    try:
        yield rig
    finally:
        rig.stop()
