"""Observes the processes of a cluster under attack: finds them, samples their memory, and checks their integrity."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import resource
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from baton.address import HostPort

PERIOD_S = 0.02
ASK_S = 8.0
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
USUAL_DESCRIPTORS = 1024
"""The soft limit that processes start with on most systems."""
ROLES = ("router", "prefill", "decode")


@dataclass(frozen=True, slots=True)
class Process:
    """`flags`: those of its command line, by name without the dashes."""

    name: str
    pid: int
    flags: dict[str, str]

    @property
    def metrics(self) -> HostPort | None:
        """The address of a node's metrics page; None for a router."""
        port = self.flags.get("metrics-port")
        return HostPort("127.0.0.1", int(port)) if port else None

    def resident_bytes(self) -> int:
        """0 if the process is gone."""
        try:
            return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * PAGE_BYTES
        except (OSError, IndexError):
            return 0


def cluster_processes() -> dict[str, Process]:
    """Our child processes that are routers or nodes, by name, the router first."""
    found = [process for path in Path("/proc").glob("[0-9]*") if (process := _child(path))]
    order = {role: place for place, role in enumerate(ROLES)}
    return {p.name: p for p in sorted(found, key=lambda p: (order[p.name.split("-")[0]], p.name))}


def _child(path: Path) -> Process | None:
    try:
        words = path.joinpath("cmdline").read_bytes().decode().split("\0")
        parent = int(path.joinpath("stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, UnicodeDecodeError, IndexError):
        return None
    if parent != os.getpid() or not any(word.endswith(("router.main", "_node.main")) for word in words):
        return None
    flags = dict(word.removeprefix("--").split("=", 1) for word in words if word.startswith("--") and "=" in word)
    return Process(flags["node-id"], int(path.name), flags)


def has_socket(port: int, peers_port: int) -> bool:
    """Whether a process on this machine still holds the end at `port` of an IPv4 connection with `peers_port`."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        here, there = (int(word.partition(":")[2], 16) for word in words[1:3])
        if (here, there) == (port, peers_port) and words[9] != "0":  # its inode
            return True
    return False


class Memory:
    """Peak resident memory within a `with` block, sampled every PERIOD_S. In bytes, by process."""

    def __init__(self, processes: dict[str, Process]) -> None:
        self._processes = processes
        self.before = self._now()
        self.peak = dict(self.before)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.after = self._now()

    def _sample(self) -> None:
        while not self._stop.wait(PERIOD_S):
            for name, size in self._now().items():
                self.peak[name] = max(self.peak[name], size)

    def _now(self) -> dict[str, int]:
        return {name: process.resident_bytes() for name, process in self._processes.items()}


async def get(address: HostPort, path: str, timeout_s: float = ASK_S) -> tuple[int, str]:
    """Status and body, or 0 and the reason why there is no answer."""

    def ask() -> tuple[int, str]:
        connection = http.client.HTTPConnection(address.host, address.port, timeout=timeout_s)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            return 0, repr(error)
        finally:
            connection.close()

    return await asyncio.to_thread(ask)


async def integrity(processes: dict[str, Process]) -> str:
    """`ok`, or the message of the first node with a failed integrity check."""
    for process in processes.values():
        if process.metrics:
            status, text = await get(process.metrics, "/integrity")
            if status != http.client.OK:
                return f"{process.name}: {status or 'no answer'} {' '.join(text.split())[:60]}"
    return "ok"


@contextlib.contextmanager
def many_descriptors() -> Iterator[None]:
    """Raise the attacker's limit; processes started within would inherit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        few_descriptors()


def few_descriptors() -> None:
    """Set the soft limit that most systems use, whatever it is here."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(USUAL_DESCRIPTORS, hard), hard))
