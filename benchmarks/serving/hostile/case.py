"""One case of `benchmarks.serving.hostile`: its target and its description."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from baton.address import HostPort
from benchmarks.serving.hostile.watch import Process

UP = "--device=cpu --log-level=warning --drain-timeout=5"


@dataclass(slots=True)
class Attack:
    """The cluster under attack, with the addresses of its nodes by name; `begin` is called once the attacker's
    preparations are complete. `ended`: what the case itself did to processes, by name."""

    http: HostPort
    grpc: HostPort
    nodes: dict[str, HostPort]
    processes: dict[str, Process]
    max_model_len: int
    vocab_size: int
    began: float = field(default_factory=time.monotonic)
    size: str = ""
    ended: dict[str, str] = field(default_factory=dict)

    def begin(self, size: str = "") -> None:
        self.size = size
        self.began = time.monotonic()

    def stop(self, name: str) -> None:
        self._send(name, signal.SIGTERM, "stopped when told to")

    def kill(self, name: str) -> None:
        self._send(name, signal.SIGKILL, "was killed")

    def _send(self, name: str, number: signal.Signals, what: str) -> None:
        self.ended[name] = what
        os.kill(self.processes[name].pid, number)

    def metrics(self, name: str) -> HostPort:
        address = self.processes[name].metrics
        assert address is not None
        return address


@dataclass(frozen=True, slots=True)
class Case:
    """`text` is for the table. `run` returns the outcome. `flags`: those of the cluster that the case needs."""

    name: str
    text: str
    run: Callable[[Attack], Awaitable[str]]
    flags: str


CASES: list[Case] = []


def case(run: Callable[[Attack], Awaitable[str]], flags: str = UP) -> Callable[[Attack], Awaitable[str]]:
    """Register a function in CASES, with its docstring as the case's text."""
    CASES.append(Case(run.__name__, (run.__doc__ or "").strip(), run, flags))
    return run


def case_with(flags: str) -> Callable[[Callable[[Attack], Awaitable[str]]], Callable[[Attack], Awaitable[str]]]:
    return lambda run: case(run, f"{UP} {flags}")
