"""A node of four ranks on two hosts, without a model: `python -m tests.node.host_scene NODE_RANK PORT CASE [FLAG...]`,
once for each host. The last rank has the misfortune, on the second host; in a CASE@RANK that rank. A flag is a field of
the settings, NAME=VALUE.

Each says on stdout which processes its ranks are, and then how far it is. It ends as `node.run` has a node end.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import numpy as np
import torch

from engine.model.other_ranks import Kind
from node.errors import StartupError
from node.limits import Limits
from node.ranks.headless import run_headless
from node.ranks.rank_links import RankLink
from node.ranks.ranks import Ranks, fork_ranks
from node.settings import NodeSettings
from tests.node.rank_scene import CPU, NUM_STEPS, misfortune

SIZE = 4
LIMITS = Limits(silence=2.0, loading_silence=3.0, report=1.0, close=0.5, join=6.0)
HOST_SIGNALS = {"host-dies": signal.SIGKILL, "host-hangs": signal.SIGSTOP}
"""What becomes of a rank's host at the first step."""
LARGE = 300_000
"""Values of a step that does not fit the buffers of a connection at once."""


class Echo:
    """In the place of a PoolServer: answers with the number of steps so far."""

    def __init__(self, send: Any) -> None:
        self._send = send

    def handle(self, message: dict[str, Any]) -> None:
        self._send(answers=message["id"], did=message["do"])


def run_rank(case: str, weights: str, link: RankLink) -> None:
    print("rank", os.getpid(), flush=True)
    what, _, number = case.partition("@")
    mine = what if link.number == int(number or SIZE - 1) else ""
    misfortune(mine, "start")
    group = link.join(CPU, lambda: weights)[0]
    group.minimum(SIZE)  # all have met
    misfortune(mine, "load")
    group.minimum(link.number)  # as loading does
    link.ready(CPU, lambda send, *_: Echo(send))  # type: ignore[arg-type]
    while True:
        kind, array = link.receive()
        misfortune(mine, "close" if kind == Kind.CLOSE else "step")
        if mine in HOST_SIGNALS:
            os.kill(os.getppid(), HOST_SIGNALS[mine])
        if kind == Kind.CLOSE:
            return
        assert np.array_equal(array, np.arange(LARGE) * int(array[1]))
        group.all_reduce(torch.tensor([float(link.number)]))


def serve(case: str, weights: str, ranks: Ranks) -> None:
    try:
        group = ranks.join(CPU, fingerprint=lambda: weights)
        group.minimum(SIZE)
        assert group.minimum(7) == 1
        pools: list[Any] = [*ranks.pools()]
    except RuntimeError as error:
        raise ranks.why(error) from error
    stopped = threading.Event()
    ranks.serves(stopped.set)
    print("serves", flush=True)
    for number in range(1, NUM_STEPS + 1):
        ranks.others._send(Kind.COMPUTE, np.arange(LARGE, dtype=np.int32) * number)
        assert float(group.all_reduce(torch.zeros(1))) == sum(range(SIZE))
        for pool in pools:
            assert pool._wire.request(5.0, do="echo")["did"] == "echo"
    if case.startswith(("waits", "host-hangs")):
        print("waits", flush=True)
        stopped.wait()


def main() -> None:
    node_rank, port, case, *flags = sys.argv[1:]
    given: dict[str, Any] = {"nnodes": 2, **dict(flag.split("=") for flag in flags)}
    weights = given.pop("weights", "same")
    where: dict[str, Any] = {"node_rank": int(node_rank), "master_port": int(port)}
    settings = NodeSettings(model="none", tensor_parallel_size=SIZE, **where, **given)
    os._exit(headless(case, weights, settings) if settings.node_rank else master(case, weights, settings))


def master(case: str, weights: str, settings: NodeSettings) -> int:
    ranks = fork_ranks(settings, lambda link, _: run_rank(case, weights, link), LIMITS)
    assert ranks is not None
    code = 1
    try:
        serve(case, weights, ranks)
        code = 0
    except (StartupError, RuntimeError) as error:  # RuntimeError: of a step that a lost rank has broken
        print(error, file=sys.stderr, flush=True)
    finally:
        ranks.close(failed=code != 0)
    return code


def headless(case: str, weights: str, settings: NodeSettings) -> int:
    try:
        return run_headless(settings, lambda link, _: run_rank(case, weights, link), LIMITS)
    except StartupError as error:
        print(error, file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    main()
