"""Runs a cluster on this machine for the duration of a measurement, and provides the addresses of its nodes."""

from __future__ import annotations

import asyncio
import itertools
import shlex
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from signal import Signals

from baton.address import HostPort
from baton.settings import parse
from deploy.plan import Child, NodePorts, node_names, plan, this_machine
from deploy.ports import HeldPort
from deploy.ready import wait_until_serving
from deploy.settings import UpSettings
from deploy.supervisor import Supervisor

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 10.0
NUM_LAST_LINES = 20
LOCAL = HostPort("127.0.0.1", 0)


def makes_answers_up(flags: str) -> bool:
    """Whether a cluster with these flags has simulated nodes, so that its answers cannot be checked."""
    return "--engine=simulated" in flags.replace("--engine simulated", "--engine=simulated").split()


@dataclass(frozen=True, slots=True)
class Addresses:
    """`prefill`, `decode`: the nodes' gRPC services; `more_http`: further routers. `signal`: sends one to the node at
    that address, if this benchmark has started it; it is started again if it ends."""

    http: HostPort
    prefill: list[HostPort]
    decode: list[HostPort]
    more_http: tuple[HostPort, ...] = ()
    signal: Callable[[HostPort, Signals], None] = lambda address, number: None


@asynccontextmanager
async def running_cluster(flags: str, *more_routers: str) -> AsyncIterator[Addresses]:
    """A cluster as `baton-up` with these flags would start it, ready to answer, on free ports; plus further routers of
    the same nodes, as a busy cluster has, each with its own additional flags.

    A child that exits is restarted, as under `baton-up`. If the cluster cannot start, prints the children's last lines
    and raises RuntimeError.
    """
    routers = {
        f"router-{i}": parse(UpSettings, shlex.split(f"{flags} {own}")) for i, own in enumerate(("", *more_routers))
    }
    names = (*routers, *node_names(routers["router-0"]))
    held = {name: [HeldPort(LOCAL) for _ in range(3)] for name in names}
    ports = {name: NodePorts(*(port.address for port in own)) for name, own in held.items()}
    fronts = {name: ports.pop(name) for name in routers}
    last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
    failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def cannot_start(name: str, code: int) -> None:
        if not failed.done():
            failed.set_result(f"{name} cannot start (exit code {code})")

    machine, children = this_machine(), list[Child]()
    for name, front in fronts.items():
        router, *nodes = plan(routers[name], machine, front.listen, front.metrics, ports)
        children += [replace(router, name=name), *([] if children else nodes)]
    supervisor = Supervisor(
        children, lambda name, line: last_lines.append(f"{name}: {line}"), cannot_start=cannot_start
    )
    supervisor.start()
    try:
        for front in fronts.values():
            await _serving(front.metrics, failed, last_lines)
        supervisor.proven = True
        roles = {
            role: [p.listen for name, p in ports.items() if name.startswith(role)] for role in ("prefill", "decode")
        }
        http, *more_http = (front.listen for front in fronts.values())

        def send(address: HostPort, number: Signals) -> None:
            supervisor.signal(next(name for name, own in ports.items() if own.listen == address), number)

        yield Addresses(http, roles["prefill"], roles["decode"], tuple(more_http), send)
    finally:
        await supervisor.stop([child.name for child in children], STOP_TIMEOUT_S)
        for port in itertools.chain(*held.values()):
            port.close()


async def _serving(grpc_address: HostPort, failed: asyncio.Future[str], last_lines: deque[str]) -> None:
    serving = asyncio.create_task(wait_until_serving(grpc_address))
    ends: list[asyncio.Future[object]] = [serving, failed]  # type: ignore[list-item] # of different results
    await asyncio.wait(ends, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        return
    serving.cancel()
    print("\n".join(last_lines), file=sys.stderr)
    raise RuntimeError(failed.result() if failed.done() else f"not ready within {START_TIMEOUT_S:g} s")
