"""A node of three ranks without a model: `python -m tests.node.rank_scene CASE`. The last rank has the misfortune.

It says on stdout which processes its ranks are, and then how far it is. It ends as `node.run` has a node end.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import numpy as np
import torch

from engine.model.other_ranks import Kind
from node.errors import StartupError
from node.limits import Limits
from node.ranks.rank_links import RankLink
from node.ranks.ranks import Ranks, fork_ranks
from node.settings import NodeSettings

SIZE = 3
NUM_STEPS = 3
LIMITS = Limits(silence=2.0, loading_silence=3.0, report=1.0, close=0.5)


CPU = torch.device("cpu")


class Counting:
    """In the place of a PoolServer: answers with the steps so far."""

    def __init__(self, send: Any, taken: list[int]) -> None:
        self._send, self._taken = send, taken

    def handle(self, message: dict[str, Any]) -> None:
        self._send(answers=message["id"], steps=self._taken)


def misfortune(case: str, moment: str) -> None:
    """What becomes of that rank then."""
    match case.split("-"):
        case ["dies", when] if when == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        case ["hangs", when] if when == moment:
            os.kill(os.getpid(), signal.SIGSTOP)
        case ["fails", when] if when == moment:
            raise ValueError("its part is too large")
        case ["rambles", when] if when == moment:
            raise ValueError("its part is too large: " + "\N{SNOWMAN}" * 12_000)
        case ["stays", when] if when == moment:
            signal.pause()


def run_rank(case: str, link: RankLink) -> None:
    mine = case if link.number == SIZE - 1 else ""
    misfortune(mine, "start")
    group = link.join(CPU, lambda: "")[0]
    group.minimum(SIZE)  # all have met
    misfortune(mine, "load")
    group.minimum(link.number)  # as loading does
    taken: list[int] = []
    link.ready(CPU, lambda send, after_steps, fail: Counting(send, taken))  # type: ignore[arg-type, return-value]
    while True:
        kind, array = link.receive()
        misfortune(mine, "close" if kind == Kind.CLOSE else "step")
        if kind == Kind.CLOSE:
            return
        taken.append(int(array[0]))
        group.all_reduce(torch.tensor([float(link.number)]))


def serve(case: str, ranks: Ranks) -> None:
    try:
        group = ranks.join(CPU)
        group.minimum(SIZE)
        assert group.minimum(7) == 1
        pools: list[Any] = [*ranks.pools()]
    except RuntimeError as error:
        raise ranks.why(error) from error
    print("serves", flush=True)
    for number in range(1, NUM_STEPS + 1):
        ranks.others._send(Kind.COMPUTE, np.array([number], np.int32))
        assert float(group.all_reduce(torch.zeros(1))) == sum(range(SIZE))
        for pool in pools:
            assert pool._wire.request(5.0, do="count")["steps"] == list(range(1, number + 1))
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
