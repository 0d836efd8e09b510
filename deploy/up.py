"""The command `baton-up`: a whole cluster on one machine."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence

import grpc
import grpc.aio

from baton.address import HostPort
from baton.process.open_files import raise_open_files, why_too_few
from baton.process.signals import stop_signals
from baton.settings import flag_name, parse
from deploy.lines import NamedLines
from deploy.plan import Machine, NodePorts, node_names, placement, plan, this_machine
from deploy.ports import HeldPort, PortTaken
from deploy.ready import wait_until_serving, why_not_ready
from deploy.settings import OwnSettings, UpSettings
from deploy.supervisor import OURS, Supervisor

EXIT_FAILED = 1
EXIT_KILLED = 130
STOP_MARGIN_S = 5.0
"""Time for a process to end, beyond the drain timeout of its requests."""
NODE_HOST = "127.0.0.1"


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP; a second one kills."""
    settings, machine = parse(UpSettings, argv), this_machine()
    try:
        if too_few := why_too_few(raise_open_files()):
            raise ValueError(too_few)
        placed = placement(settings, machine)
        ports = {name: _hold(getattr(settings, name), name) for name in ("http", "grpc")}
        cluster = _Cluster(settings, machine, ports["http"], ports["grpc"])
    except (PortTaken, ValueError) as error:
        sys.stderr.write(f"{settings.prog}: {error}\n")
        sys.exit(EXIT_FAILED)
    sys.exit(asyncio.run(cluster.serve(placed)))


def _hold(address: HostPort, name: str) -> HeldPort:
    try:
        return HeldPort(address)
    except PortTaken as error:
        raise PortTaken(f"{flag_name(name)}: {error}") from None


class _Cluster:
    """One run of the command. Holds all ports until the process ends, for children that are restarted. Raises
    PortTaken."""

    def __init__(self, settings: OwnSettings, machine: Machine, http_port: HeldPort, grpc_port: HeldPort) -> None:
        self._settings = settings
        self._http, self._grpc = _reachable(http_port.address), _reachable(grpc_port.address)
        local = HostPort(NODE_HOST, 0)
        self._node_ports = {name: tuple(HeldPort(local) for _ in range(3)) for name in node_names(settings)}
        self._own_ports = (http_port, grpc_port)
        ports = {name: NodePorts(*(port.address for port in held)) for name, held in self._node_ports.items()}
        self._children = plan(settings, machine, http_port.address, grpc_port.address, ports)

    async def serve(self, placed: str | None) -> int:
        """Serve until the command ends; returns the exit code. placed: what to say of where ranks compute."""
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = loop.create_future()
        self._kill = asyncio.Event()
        for number in stop_signals():
            loop.add_signal_handler(number, self._on_signal)
        lines = NamedLines(sys.stderr, [OURS, *(child.name for child in self._children)])
        self._supervisor = Supervisor(self._children, lines, cannot_start=self._on_cannot_start)
        if placed is not None:
            self._supervisor.say(placed)
        self._supervisor.start()
        telling = asyncio.create_task(self._tell_when_ready())
        code = await self._ended
        telling.cancel()
        return code if await self._shut_down() else EXIT_KILLED

    def _end(self, code: int, text: str) -> None:
        if not self._ended.done():
            self._supervisor.say(text)
            self._ended.set_result(code)

    def _on_signal(self) -> None:
        if self._ended.done():
            self._kill.set()
        self._end(0, "stopping; Ctrl-C again kills")

    def _on_cannot_start(self, name: str, code: int) -> None:
        self._end(code, f"{name} cannot start (exit code {code})")

    async def _tell_when_ready(self) -> None:
        try:
            async with asyncio.timeout(self._settings.ready_timeout):
                await wait_until_serving(self._grpc)
        except TimeoutError:
            reason = await asyncio.to_thread(why_not_ready, self._http)
            self._end(EXIT_FAILED, f"not ready within {self._settings.ready_timeout:g} s: {reason}")
        except grpc.aio.AioRpcError as error:
            self._end(EXIT_FAILED, f"the router does not tell its health: {error.code().name} {error.details()}")
        else:
            self._supervisor.proven = True
            with contextlib.suppress(BrokenPipeError):  # the reader is gone: no reason not to serve
                print(f"ready http://{self._http} grpc {self._grpc}", flush=True)

    async def _shut_down(self) -> bool:
        """Stop the router first, which drains running requests, then the nodes. False: killed meanwhile."""
        killed = asyncio.create_task(self._kill.wait())
        stopped = asyncio.create_task(self._stop_in_order())
        await asyncio.wait([stopped, killed], return_when=asyncio.FIRST_COMPLETED)
        killed.cancel()
        if stopped.done():
            return True
        stopped.cancel()
        self._supervisor.say("killing")
        await self._supervisor.kill()
        return False

    async def _stop_in_order(self) -> None:
        timeout_s = self._settings.drain_timeout + STOP_MARGIN_S
        await self._supervisor.stop(["router"], timeout_s)
        await self._supervisor.stop(list(self._node_ports), timeout_s)


def _reachable(address: HostPort) -> HostPort:
    """The address at which this machine reaches a listener on `address`."""
    if not address.is_wildcard:
        return address
    return HostPort("::1" if ":" in address.host else "127.0.0.1", address.port)


if __name__ == "__main__":
    main()
