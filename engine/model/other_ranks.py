"""The other ranks: the messages that rank 0 sends them, and how they execute these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Protocol

import numpy as np

from engine.model.parallel.expert_placement import Placement
from engine.model.rank import RankModel
from engine.model.rank_step import Int32Array, RankStep


class OtherRanks(Protocol):
    """Forwards each call to all other ranks, which make it on their RankModel; rank 0 also makes it on its own. No call
    waits until the others are done."""

    def compute(self, step: RankStep) -> None: ...

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None: ...

    def rearrange_experts(self, layer: int, placement: Placement) -> None: ...

    def warm_up(self) -> None: ...

    def capture(self, decode_sizes: Sequence[int], most_prompt_tokens: int) -> None: ...


class NoOtherRanks:
    """The other ranks of a node with one rank: there are none."""

    def compute(self, step: RankStep) -> None:
        """Nothing to do."""

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Nothing to do."""

    def rearrange_experts(self, layer: int, placement: Placement) -> None:
        """Nothing to do."""

    def warm_up(self) -> None:
        """Nothing to do."""

    def capture(self, decode_sizes: Sequence[int], most_prompt_tokens: int) -> None:
        """Nothing to do."""


NO_OTHERS = NoOtherRanks()


class Kind(IntEnum):
    """The kind of a message."""

    COMPUTE = 0
    COPY_BLOCKS = 1
    WARM_UP = 2
    CAPTURE = 3
    REARRANGE_EXPERTS = 4
    CLOSE = 5


class RemoteRanks:
    """Implements OtherRanks for ranks that run `serve`. send: sends a kind and an array to all of them, in order."""

    def __init__(self, send: Callable[[int, Int32Array], None]) -> None:
        self._send = send

    def compute(self, step: RankStep) -> None:
        self._send(Kind.COMPUTE, step.to_array())

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        self._send(Kind.COPY_BLOCKS, np.array(pairs, np.int32).reshape(-1))

    def rearrange_experts(self, layer: int, placement: Placement) -> None:
        self._send(Kind.REARRANGE_EXPERTS, np.array([layer, *placement], np.int32))

    def warm_up(self) -> None:
        self._send(Kind.WARM_UP, np.zeros(0, np.int32))

    def capture(self, decode_sizes: Sequence[int], most_prompt_tokens: int) -> None:
        self._send(Kind.CAPTURE, np.array([most_prompt_tokens, *decode_sizes], np.int32))

    def close(self) -> None:
        """Make the other ranks leave `serve`."""
        self._send(Kind.CLOSE, np.zeros(0, np.int32))


def serve(rank: RankModel, receive: Callable[[], tuple[int, Int32Array]]) -> None:
    """Make the calls that rank 0 sends, until it sends CLOSE. receive: waits for the next kind and array."""
    while True:
        kind, array = receive()
        match Kind(kind):
            case Kind.COMPUTE:
                rank.compute(RankStep.from_array(array))
            case Kind.COPY_BLOCKS:
                rank.copy_blocks([(source, target) for source, target in array.reshape(-1, 2).tolist()])
            case Kind.REARRANGE_EXPERTS:
                rank.rearrange_experts(int(array[0]), array[1:])
            case Kind.WARM_UP:
                rank.warm_up_kernels()
            case Kind.CAPTURE:
                most_prompt_tokens, *decode_sizes = array.tolist()
                rank.capture(decode_sizes, most_prompt_tokens)
            case Kind.CLOSE:
                return
