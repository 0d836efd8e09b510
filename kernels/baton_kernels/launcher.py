"""Launches of a kernel that a step cannot do without, over and over."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any


class Launcher:
    """Triton takes 15 to 40 us to find out from a launch's arguments which kernel it has compiled for them, a multiple
    of the launch itself. This remembers the kernel, by `like`: all that Triton would look at. That are the arguments'
    types and constants, and of arguments that it may compile specially for, whether they are multiples of 16 or one.

    On the current stream, of the device that is current too. One thread at a time.
    """

    def __init__(self, kernel: Any, num_warps: int) -> None:
        self._kernel = kernel
        self._num_warps = num_warps
        self._known: dict[Hashable, Any] = {}

    def __call__(self, like: Hashable, grid: tuple[int, int, int], *arguments: Any) -> None:
        """arguments: all of the kernel, in its order."""
        if (compiled := self._known.get(like)) is not None:
            compiled[grid](*arguments)
            return
        compiled = self._kernel[grid](*arguments, num_warps=self._num_warps)
        if compiled is not None:  # Triton's interpreter compiles nothing
            self._known[like] = compiled
