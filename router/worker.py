"""One worker of `baton-router --workers N`: `python -m router.worker INDEX UP_FD DIRECTORY HTTP GRPC FLAGS...`

The flags are the router's own. It serves on the addresses given, which it shares with the other workers, and says so on
the descriptor, again and again from when it does. It ends like a router, and also when its stdin does, which is when
its parent has ended; if it was stopped, it goes on then.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from pathlib import Path

import uvloop

from baton.address import HostPort
from baton.process.parent import wake_with_parent
from baton.rpc.streams import HEARTBEAT_S
from baton.settings import parse
from router.main import EXIT_FAILED, configure, serve
from router.settings import RouterSettings
from router.startup import StartError
from router.workers.siblings import WorkerContext, WorkerPlace


def main() -> None:
    wake_with_parent()
    index, up_fd, directory, http, grpc, *flags = sys.argv[1:]
    settings = parse(RouterSettings, flags)
    place = WorkerPlace(int(index), settings.workers, Path(directory))
    shared = WorkerContext(place, HostPort.parse(http), HostPort.parse(grpc))
    configure(settings, f"/{index}")
    try:
        uvloop.run(_run(settings, shared, int(up_fd)))
    except StartError as error:
        sys.stderr.write(f"{settings.prog}: {error}\n")
        sys.exit(EXIT_FAILED)


async def _run(settings: RouterSettings, shared: WorkerContext, up_fd: int) -> None:
    stop, orphaned = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def end_with_parent() -> None:
        orphaned.set()
        stop.set()

    loop.add_reader(sys.stdin.fileno(), end_with_parent)  # nothing is ever written there
    os.set_blocking(up_fd, False)

    def beat() -> None:
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # the parent hangs, or is gone
            os.write(up_fd, b"up\n")
        loop.call_later(HEARTBEAT_S, beat)

    await serve(settings, stop, asyncio.Event(), shared, beat)
    if orphaned.is_set():  # nobody else is left to remove the sockets
        shutil.rmtree(shared.place.directory, ignore_errors=True)


if __name__ == "__main__":
    main()
