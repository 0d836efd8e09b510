"""A node of three ranks without a model: `python -m tests.node.rank_scene CASE`. The last rank has the misfortune.

It says on stdout which processes its ranks are, and then how far it is. It ends as `node.run` has a node end.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, cast

import numpy as np
import torch

from engine.model.parallel.others import Kind
from node.errors import StartupError
from node.ranks.forks import Limits
from node.ranks.rank_links import RankLink
from node.ranks.ranks import Ranks, fork_ranks
from node.settings import NodeSettings

SIZE = 3
NUM_STEPS = 3
BLOCK_BYTES = 64
LIMITS = Limits(silence=2.0, loading_silence=3.0, report=1.0, close=0.5)


CPU = torch.device("cpu")


def misfortune(case: str, moment: str) -> None:
    """What becomes of that rank then."""
    match case.split("-"):
        case ["dies", when] if when == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        case ["hangs", when] if when == moment:
            os.kill(os.getpid(), signal.SIGSTOP)
        case ["fails", when] if when == moment:
            raise ValueError("its part is too large")
        case ["stays", when] if when == moment:
            signal.pause()


def run_rank(case: str, link: RankLink) -> None:
    mine = case if link.number == SIZE - 1 else ""
    misfortune(mine, "start")
    group = link.join(CPU, lambda: "")[0]
    group.minimum(SIZE)  # all have met
    misfortune(mine, "load")
    group.minimum(link.number)  # as loading does
    shared = link.memory(CPU)
    assert shared is not None
    memory = shared(2 * BLOCK_BYTES)
    link.ready(memory, no_pool_server)
    while True:
        kind, array = link.receive()
        misfortune(mine, "close" if kind == Kind.CLOSE else "step")
        if kind == Kind.CLOSE:
            return
        memory[BLOCK_BYTES] = int(array[0])
        group.all_reduce(torch.tensor([float(link.number)]))


def no_pool_server(*_: object) -> Any:
    raise AssertionError("rank 0 is on this host")


def serve(case: str, ranks: Ranks) -> None:
    try:
        group = ranks.join(CPU)
        group.minimum(SIZE)
        assert group.minimum(7) == 1
        pools = cast("list[torch.Tensor]", ranks.pools([BLOCK_BYTES] * (SIZE - 1)))
    except RuntimeError as error:
        raise ranks.why(error) from error
    print("serves", flush=True)
    for number in range(1, NUM_STEPS + 1):
        ranks.others._send(Kind.COMPUTE, np.array([number], np.int32))
        assert float(group.all_reduce(torch.zeros(1))) == sum(range(SIZE))
        assert [int(pool[1, 0]) for pool in pools] == [number] * (SIZE - 1)  # what they wrote is seen here
    if case == "waits":
        print("waits", flush=True)
        signal.pause()


def main() -> None:
    case, code = sys.argv[1], 0
    settings = NodeSettings(model="none", tensor_parallel_size=SIZE)
    ranks = fork_ranks(settings, lambda link, _: run_rank(case, link), LIMITS)
    assert ranks is not None
    print("ranks", *(rank.pid for rank in ranks._forked.forks.all), flush=True)
    try:
        serve(case, ranks)
    except StartupError as error:
        print(error, file=sys.stderr, flush=True)
        code = 1
    finally:
        ranks.close()
    os._exit(code)


if __name__ == "__main__":
    main()
