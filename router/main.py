"""The command `baton-router`."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Sequence

import uvloop

from baton.open_files import raise_open_files
from baton.settings import parse
from baton.signals import stop_signals
from baton.telemetry import configure_logging
from router.edge import StartError
from router.server import RouterServer
from router.settings import RouterSettings

EXIT_FAILED = 1
_GC_THRESHOLDS = (20_000, 20, 50)
"""A step's tokens for a thousand streams are some thousand objects, none of them garbage: the default of 700 collects
within each step, which takes a tenth of the router's time."""


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP, then drain; a second one ends at once. Exits with 1 if it cannot start."""
    settings = parse(RouterSettings, argv)
    configure_logging(settings.logging_level(), settings.node_id or f"router-{settings.http.port}")
    raise_open_files()
    try:
        uvloop.run(_serve(settings))
    except StartError as error:
        sys.stderr.write(f"{settings.prog}: {error}\n")
        sys.exit(EXIT_FAILED)


async def _serve(settings: RouterSettings) -> None:
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, on_signal)
    server = RouterServer(settings)
    await server.start()
    gc.freeze()  # objects made so far stay: collections need not look at them again
    gc.set_threshold(*_GC_THRESHOLDS)
    stopping, ended = asyncio.create_task(stop.wait()), asyncio.create_task(server.ended())
    await asyncio.wait((stopping, ended), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    ended.cancel()
    await server.stop(hurry)


if __name__ == "__main__":
    main()
