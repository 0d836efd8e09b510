"""Routers and nodes as real processes on this machine, which tests may kill, stop and start again one by one.

    with Cluster(folder) as cluster:
        prefill, decode = cluster.node("prefill", "prefill-0"), cluster.node("decode", "decode-0")
        router = cluster.router([prefill], [decode])
        router.wait_ready()

Every process keeps its ports over all its lives. None outlives the test process, whatever becomes of it. They are
forked from one that has imported torch; `tests/docs` and `tests/deploy` start roles by their commands.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families

from baton.address import HostPort
from deploy.plan import clean_environment
from deploy.ports import HeldPort
from tests.fork_server import NODE_FLAGS, ForkedProcess, fork_server

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 150.0
"""For anything that only takes as long as the machine needs. Many times what an idle one takes."""
POLL_S, MAX_POLL_S = 0.01, 0.1
PAGE_TIMEOUT_S = 40.0
STOP_S = 20.0
MODEL = "baton-tiny"
DEVICE = os.environ.get(NODE_FLAGS, "--device=cpu --cpu-threads=1").split()
"""Flags of all nodes, which come before their own."""
BLOCKS = "--num-gpu-blocks-override=1024"
"""Of nodes that say nothing else: four requests of full length. For 26,000, as by itself, an audit takes a second."""
PATIENT = "--silence-timeout=5"
"""Tests run on machines where a process may not run for seconds."""

M = TypeVar("M", bound="Member")
Role = Literal["prefill", "decode"]


def wait_until(why_not: Callable[[], str | None], timeout_s: float = PATIENCE_S) -> None:
    """Ask until there is no more reason why not; no answer from a process is one. From async tests: in a thread.

    What takes longer is asked for less often: a page of metrics costs those who are waited for 10 ms."""
    began = time.monotonic()
    while reason := _ask(why_not):
        waited_s = time.monotonic() - began
        assert waited_s < timeout_s, f"after {timeout_s:g} s: {reason}"
        time.sleep(min(max(POLL_S, waited_s / 10), MAX_POLL_S))


def _ask(why_not: Callable[[], str | None]) -> str | None:
    try:
        return why_not()
    except httpx.TransportError as error:
        return f"{error.request.url}: {error!r}"


class Metrics:
    """A page of metrics, as it was at one moment."""

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines(keepends=True)

    def sum(self, name: str, **labels: str) -> float:
        """Over all samples with these labels. Other lines are not parsed: that takes 8 ms for a node's page."""
        families = text_string_to_metric_families("".join(line for line in self._lines if line.startswith(name)))
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


class Member:
    """One process of a cluster, over all its lives. `args` do not change."""

    def __init__(self, name: str, module: str, args: Sequence[str], folder: Path, http: HostPort) -> None:
        self.name = name
        self.url = f"http://{http}"
        self.log = folder / f"{name}.log"
        self._module, self._args = module, args
        self._process: ForkedProcess | None = None
        self._client = httpx.Client(trust_env=False, verify=False, timeout=PAGE_TIMEOUT_S)

    def start(self) -> None:
        """Begin a new life; `wait_*` tells when it serves."""
        assert not self.alive, f"{self.name} runs"
        roots = (ROOT, ROOT / "proto", ROOT / "kernels")
        env = {
            **clean_environment(os.environ),
            "PYTHONPATH": os.pathsep.join(map(str, roots)),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        with self.log.open("ab") as log:
            self._process = fork_server().start(self._module, self._args, env=env, cwd=ROOT, stdout=log, stderr=log)

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> float:
        """SIGKILL; returns when (`time.monotonic`)."""
        assert self._process
        at = time.monotonic()
        self._process.kill()
        self._process.wait(STOP_S)
        return at

    def freeze(self) -> None:
        """SIGSTOP: it hangs, with all its connections up."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """SIGTERM."""
        self._signal(signal.SIGTERM)

    def wait_exit(self, timeout_s: float = PATIENCE_S) -> int:
        """The exit code, once it has ended."""
        assert self._process
        return self._process.wait(timeout_s)

    def terminate(self) -> int:
        """SIGTERM; the exit code."""
        self.stop()
        return self.wait_exit(STOP_S)

    def close(self) -> None:
        """End it at once, if it runs."""
        if self.alive:
            self.kill()
        self._client.close()

    def page(self, path: str) -> httpx.Response:
        return self._client.get(self.url + path)

    def metrics(self) -> Metrics:
        return Metrics(self.page("/metrics").text)

    def metric(self, name: str, **labels: str) -> float:
        """The sum over all samples with these labels."""
        return self.metrics().sum(name, **labels)

    def wait_page(self, path: str, timeout_s: float = PATIENCE_S) -> None:
        """Until that page answers 200."""
        wait_until(lambda: self._why_not(path), timeout_s)

    def _why_not(self, path: str) -> str | None:
        assert self.alive, f"{self.name} ended by itself:\n{self.log_tail()}"
        answer = self.page(path)
        return None if answer.status_code == 200 else f"{self.name} {path}: {answer.status_code} {answer.text}"

    def _signal(self, number: signal.Signals) -> None:
        assert self._process
        self._process.send_signal(number)

    def log_tail(self, since: int = 0, limit: int = 8000) -> str:
        """What it logged from byte `since` on; the end of it."""
        return self.log.read_bytes()[since:][-limit:].decode(errors="replace") if self.log.exists() else ""


class Node(Member):
    """`address`: of its gRPC services."""

    def __init__(self, name: str, role: Role, flags: Sequence[str], folder: Path, ports: Sequence[HeldPort]) -> None:
        self.role = role
        self.address = ports[0].address
        own = [f"--node-id={name}", f"--listen={self.address}", f"--metrics-port={ports[1].address.port}"]
        shared = [f"--model={MODEL}", *DEVICE, "--drain-timeout=5", PATIENT, BLOCKS]
        super().__init__(name, f"{role}_node.main", [*shared, *own, *flags], folder, ports[1].address)

    def wait_ready(self) -> None:
        self.wait_page("/health")

    def wait_whole(self) -> None:
        """Until no request is left and every block and slot is back; its accounts must agree then."""
        wait_until(self._why_not_whole)
        wait_until(self._why_metrics_disagree)
        assert self.page("/integrity").status_code == 200

    def audit(self) -> dict[str, Any]:
        """Every block and slot, as the node accounts for them."""
        page = self.page("/debug/kv")
        assert page.status_code == 200, f"{self.name}: {page.text}"
        audit: dict[str, Any] = page.json()
        return audit

    def _why_not_whole(self) -> str | None:
        audit = self.audit()
        assert audit["integrity"] == "ok", f"{self.name}: {audit['integrity']}"
        held = [block for block in audit["blocks"] if block["state"] != "cached"]
        slots = [slot for slot in audit["slots"] if slot["state"] != "free"]
        whole = audit["idle"] and not audit["holders"] and not held and not slots
        return None if whole else f"{self.name} is not whole: {audit['holders']} {held} {slots} idle {audit['idle']}"

    def _why_metrics_disagree(self) -> str | None:
        metrics = self.metrics()
        load = {name: metrics.sum(f"baton:num_requests_{name}") for name in ("running", "waiting")}
        blocks = {state: metrics.sum("baton:kv_blocks", state=state) for state in ("free", "cached")}
        total = metrics.sum("baton:kv_blocks")
        slots = metrics.sum("baton:kv_slots", state="in_use")
        whole = total > 0 and sum(blocks.values()) == total and not any(load.values()) and not slots
        return None if whole else f"{self.name}'s metrics: {load}, {blocks} of {total} blocks, {slots} slots in use"


def wait_whole(nodes: Iterable[Node]) -> None:
    """Until each is, all at once: a node pauses after each audit (`node.auditor`)."""
    with ThreadPoolExecutor() as pool:
        for _ in pool.map(Node.wait_whole, nodes):
            pass


class Router(Member):
    """`grpc`: address of its gRPC API; `url` is that of HTTP."""

    def __init__(
        self,
        name: str,
        prefill: Sequence[HostPort],
        decode: Sequence[HostPort],
        flags: Sequence[str],
        folder: Path,
        ports: Sequence[HeldPort],
    ) -> None:
        self.grpc = ports[1].address
        own = [f"--node-id={name}", f"--http={ports[0].address}", f"--grpc={self.grpc}", "--drain-timeout=5", PATIENT]
        roles = (("prefill", prefill), ("decode", decode))
        nodes = [f"--{role}={','.join(map(str, there))}" for role, there in roles if there]
        extras = ["--trust-request-chat-template"]
        super().__init__(name, "router.main", [*own, *nodes, *extras, *flags], folder, ports[0].address)

    def wait_ready(self) -> None:
        """Until requests are answered, and no kind of node is missing."""

        def why_not() -> str | None:
            status = self.page("/ready").json()
            return None if status == {"status": "ready"} else f"{self.name}: {status}"

        self.wait_page("/ready")
        wait_until(why_not)

    def wait_nodes(self, prefill: int, decode: int) -> None:
        """Until so many nodes are in use."""

        def why_not() -> str | None:
            metrics = self.metrics()
            up = [metrics.sum("baton:nodes", node_role=role, state="up") for role in ("prefill", "decode")]
            return None if up == [prefill, decode] else f"{self.name} uses {up} prefill and decode nodes"

        wait_until(why_not)

    def states(self) -> dict[str, int]:
        """Live requests by state; states without any left out."""
        names = ("queued", "prefilling", "handing_off", "decoding")
        metrics = self.metrics()
        counts = {name: int(metrics.sum("baton:num_requests", state=name)) for name in names}
        return {name: count for name, count in counts.items() if count}

    def wait_idle(self) -> None:
        """Until no request is left, and it has heard from its nodes that they have nothing to do."""

        def why_not() -> str | None:
            loads = {node["node_id"]: node["load"] or {} for node in self.page("/debug/nodes").json()["nodes"]}
            busy = {name: load for name, load in loads.items() if load.get("num_waiting") or load.get("num_running")}
            return f"{self.name} has heard of {busy}" if busy else None

        self.wait_states()
        wait_until(why_not)

    def wait_states(self, timeout_s: float = PATIENCE_S, **wanted: int) -> None:
        """Until the live requests are exactly these."""

        def why_not() -> str | None:
            states = self.states()
            return None if states == wanted else f"{self.name} has {states}, not {wanted}"

        wait_until(why_not, timeout_s)


class Cluster:
    """All processes of a test, and the ports that they keep. Logs go to `folder`."""

    def __init__(self, folder: Path) -> None:
        self.members: list[Member] = []
        self._folder = folder
        self._held: list[HeldPort] = []

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for member in reversed(self.members):
            member.close()
        for port in self._held:
            port.close()

    def node(self, role: Role, name: str, *flags: str, start: bool = True) -> Node:
        """A node, being started; or only its addresses, for a later `start`."""
        return self._add(Node(name, role, flags, self._folder, self._ports(2)), start)

    def same_address(self, node: Node, name: str, *flags: str) -> Node:
        """Another node where `node`, which must not run, was."""
        assert not node.alive
        ports = [
            port for port in self._held if str(port.address) in (str(node.address), node.url.removeprefix("http://"))
        ]
        ports.sort(key=lambda port: port.address != node.address)
        return self._add(Node(name, node.role, flags, self._folder, ports), True)

    def router(self, prefill: Sequence[Node], decode: Sequence[Node], *flags: str, name: str = "") -> Router:
        """A router in front of these nodes, being started."""
        name = name or f"router-{sum(isinstance(member, Router) for member in self.members)}"
        prefills, decodes = ([node.address for node in nodes] for nodes in (prefill, decode))
        return self._add(Router(name, prefills, decodes, flags, self._folder, self._ports(2)), True)

    def _add(self, member: M, start: bool) -> M:
        self.members.append(member)
        if start:
            member.start()
        return member

    def _ports(self, count: int) -> list[HeldPort]:
        ports = [HeldPort(HostPort("127.0.0.1", 0)) for _ in range(count)]
        self._held += ports
        return ports
