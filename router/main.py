"""The command `baton-router`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import sys
from collections.abc import Callable, Sequence

import uvloop

from baton.address import HostPort
from baton.process.open_files import raise_open_files
from baton.process.signals import stop_signals
from baton.settings import flag_name, parse
from baton.telemetry import configure_logging
from router.server import RouterServer
from router.settings import RouterSettings
from router.startup import StartError
from router.supervisor import Supervisor
from router.workers.ports import SharedPort
from router.workers.siblings import WorkerContext

log = logging.getLogger(__name__)

EXIT_FAILED = 1
_GC_THRESHOLDS = (20_000, 20, 50)
"""A step's tokens for a thousand streams are some thousand objects, none of them garbage: the default of 700 collects
within each step, which takes a tenth of the router's time."""


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP, then drain; a second one ends at once. Exits with 1 if it cannot start."""
    settings = parse(RouterSettings, argv)
    configure(settings)
    try:
        if settings.workers > 1:
            flags = sys.argv[1:] if argv is None else argv
            started = uvloop.run(_supervise(settings, flags))
        else:
            uvloop.run(serve(settings, asyncio.Event(), asyncio.Event()))
            started = True
    except StartError as error:
        sys.stderr.write(f"{settings.prog}: {error}\n")
        sys.exit(EXIT_FAILED)
    if not started:
        sys.exit(EXIT_FAILED)


def configure(settings: RouterSettings, name: str = "") -> None:
    """Logs and limits of the process. `name` follows the router's in log lines."""
    node_id = settings.node_id or f"router-{settings.http.port}"
    configure_logging(settings.log_levels(), node_id + name, log_format=settings.log_format)
    raise_open_files()


async def serve(
    settings: RouterSettings,
    stop: asyncio.Event,
    hurry: asyncio.Event,
    shared: WorkerContext | None = None,
    up: Callable[[], object] = lambda: None,
) -> None:
    """A router until `stop` or a signal. `shared`: as a worker; `up` is called once it serves. Raises StartError."""
    _stop_on_signals(stop, hurry)
    server = RouterServer(settings, shared)
    await server.start()
    gc.freeze()  # objects made so far stay: collections need not look at them again
    gc.set_threshold(*_GC_THRESHOLDS)
    up()
    stopping, ended = asyncio.create_task(stop.wait()), asyncio.create_task(server.ended())
    await asyncio.wait((stopping, ended), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    ended.cancel()
    await server.stop(hurry)


async def _supervise(settings: RouterSettings, flags: Sequence[str]) -> bool:
    """The workers of a router, until a signal. False: one could not start. Raises StartError."""
    stop, hurry = asyncio.Event(), asyncio.Event()
    _stop_on_signals(stop, hurry)
    with contextlib.ExitStack() as stack:
        http, grpc = (
            stack.enter_context(contextlib.closing(_shared(name, address)))
            for name, address in (("http", settings.http), ("grpc", settings.grpc))
        )
        log.info("workers=%d http=%s grpc=%s", settings.workers, http.address, grpc.address)

        def command(index: int, up_fd: int, directory: str) -> list[str]:
            own = [str(index), str(up_fd), directory, str(http.address), str(grpc.address)]
            return [sys.executable, "-m", "router.worker", *own, *flags]

        return await Supervisor(settings.workers, command, settings.drain_timeout).run(stop, hurry)


def _shared(name: str, address: HostPort) -> SharedPort:
    try:
        return SharedPort(address)
    except OSError as error:
        raise StartError(f"{flag_name(name)}: {address} cannot be had: {error.strerror or error}") from error


def _stop_on_signals(stop: asyncio.Event, hurry: asyncio.Event) -> None:
    """The first signal sets `stop`, the next one `hurry`."""

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, on_signal)


if __name__ == "__main__":
    main()
