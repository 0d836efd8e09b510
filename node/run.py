"""The lifecycle of a node's process: load, serve, drain, exit.

A host with --node-rank above 0 runs only ranks of the node: `node.ranks.headless`.

exit code 0    stopped by SIGTERM, SIGINT or SIGHUP, all requests finished
          1    could not start, or the engine failed, or requests were left after --drain-timeout
          2    bad settings
128 + signal   a second signal, or one while it starts, at once
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import uvloop

from baton.errors import BatonError
from baton.node_info import NodeRole
from baton.process.open_files import raise_open_files
from baton.process.signals import end_at_signals, stop_signals
from baton.telemetry import configure_logging
from node import preflight
from node.errors import StartupError
from node.garbage import collected_once
from node.loop import NodeLoop
from node.parts import MakeRole, assemble
from node.peers.nodes import PeerNodes
from node.ranks.headless import run_headless
from node.ranks.process import run_rank
from node.ranks.ranks import Ranks, fork_ranks
from node.settings import NodeSettings
from node.shell import Node, NodeParts, RoleSide

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005
"""How long a thread may keep the interpreter while others want it. With Python's default of 5 ms, tokens would wait
while a node takes over a prompt of 32,000 tokens."""
_PEERS_MARGIN_S = 2.0
"""Extra time for other data parallel nodes, which hear a moment later that they should drain."""


def run_node(settings: NodeSettings, role: NodeRole, side: RoleSide, make_role: MakeRole) -> NoReturn:
    """Serve until a signal, and exit.

    Skips the interpreter's teardown: everything that must be closed is closed by then, and unloading torch and
    transformers would take seconds.
    """
    configure_logging(settings.log_levels(), settings.name(role), log_format=settings.log_format)
    raise_open_files()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _end_at_signals()
    try:
        code = _run(settings, side, make_role)
    except StartupError as error:
        sys.stderr.write(f"{settings.prog}: {' '.join(str(error).split())}\n")
        code = 1
    except KeyboardInterrupt:  # a second signal, once everything has stopped
        code = 128 + signal.SIGINT
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_at_signals() -> None:
    """While the node starts, have a signal end the process at once, even while it is inside a library. Python's
    KeyboardInterrupt does not help: it waits for the threads that read weights, and is lost in a library's callback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_at_signals()


def _run(settings: NodeSettings, side: RoleSide, make_role: MakeRole) -> int:
    if settings.node_rank:
        return run_headless(settings, run_rank)
    ranks, code = fork_ranks(settings, run_rank), 1
    try:
        code = _run_ranks(settings, side, make_role, ranks)
    finally:
        if ranks is not None:
            ranks.close(failed=code != 0)
    return code


def _run_ranks(settings: NodeSettings, side: RoleSide, make_role: MakeRole, ranks: Ranks | None) -> int:
    preflight.check_names(settings)
    preflight.check(settings)
    loop = NodeLoop(turn_timeout_s=settings.step_timeout)
    try:
        parts = _make_frozen_parts(make_role, settings, loop.wake, ranks)
    except (ValueError, OSError, BatonError) as error:  # what a wrong --model, size or transport raises
        log.debug("start failed", exc_info=error)
        raise StartupError(str(error)) from error
    except ModuleNotFoundError as error:  # the base install is for the router only
        raise StartupError(f"{error}: a node needs the extra, pip install 'baton-serve[node]'") from error
    try:
        return uvloop.run(_serve(settings, side, parts, loop, ranks))
    finally:
        parts.close()


def _make_frozen_parts(
    make_role: MakeRole, settings: NodeSettings, wake: Callable[[], None], ranks: Ranks | None = None
) -> NodeParts:
    """Make the parts, and exempt them from garbage collection."""
    with collected_once():
        if settings.engine == "torch":
            import kv_transfer.slot_copies  # noqa: F401
            import node.build  # torch and transformers, whose objects are frozen next
            import node.structured_output.grammars  # noqa: F401
        gc.freeze()
        return assemble(make_role, settings, wake, ranks)


async def _serve(settings: NodeSettings, side: RoleSide, parts: NodeParts, loop: NodeLoop, ranks: Ranks | None) -> int:
    node = Node(settings, side, parts, loop)
    try:
        await node.start()
    except ValueError as error:
        raise StartupError(str(error)) from error
    stop = _signals()
    log.info("ready address=%s metrics=http://%s/metrics seconds=%.2f", node.address, node.metrics.address, _age_s())
    ends: list[asyncio.Future[Any]] = [stop, node.failure, _stopped_by(parts.peers, ranks)]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    deadline = time.monotonic() + settings.drain_timeout
    drained = not node.failure.done() and await _drain(node, parts.peers)
    if parts.peers is not None and not node.failure.done():
        drained &= await _leave(parts.peers, node, deadline, drained)
    ended = await node.stop()
    code = 0 if drained and ended else 1
    log.info("stopped exit_code=%d", code)
    if not ended:
        os._exit(code)  # a thread inside the model cannot be unwound
    return code


def _age_s() -> float:
    """Seconds since the process began, imports included (man proc_pid_stat: starttime)."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def _stopped_by(peers: PeerNodes | None, ranks: Ranks | None) -> asyncio.Future[None]:
    """Completes when another data parallel node, or another host of this one, is told to stop: all stop together."""
    aio = asyncio.get_running_loop()
    stopped: asyncio.Future[None] = aio.create_future()

    def tell() -> None:
        if not stopped.done():
            stopped.set_result(None)

    def stop() -> None:
        """On another thread, at any time."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: this node has stopped already
            aio.call_soon_threadsafe(tell)

    if peers is not None:
        peers.ready(stop)
    if ranks is not None:
        ranks.serves(stop)
    return stopped


async def _leave(peers: PeerNodes, node: Node, deadline: float, drained: bool) -> bool:
    """Wait until all data parallel nodes have drained, since they need this node's experts; if this node has given up,
    only until they know that."""
    left_s = max(0.0, deadline - time.monotonic()) if drained else 0.0
    leave = asyncio.get_running_loop().run_in_executor(None, peers.leave, left_s + _PEERS_MARGIN_S, drained)
    ends: list[asyncio.Future[Any]] = [leave, node.failure]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    peers.give_up()
    return await leave


async def _drain(node: Node, peers: PeerNodes | None) -> bool:
    log.info("draining")
    if peers is not None:
        peers.stop_others()
    drain = asyncio.create_task(node.drain())
    ends: list[asyncio.Future[Any]] = [drain, node.failure]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    drain.cancel()
    done = drain.done() and drain.result()
    if not done:
        log.warning("requests were left unfinished")
    return done


def _signals() -> asyncio.Future[int]:
    """Completes at the first SIGTERM, SIGINT or SIGHUP; a second one kills the process."""
    aio = asyncio.get_running_loop()
    first: asyncio.Future[int] = aio.create_future()

    def handle(number: int) -> None:
        if first.done():
            os._exit(128 + number)
        first.set_result(number)

    for number in stop_signals():
        aio.add_signal_handler(number, handle, number)
    return first
