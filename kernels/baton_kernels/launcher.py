"""Low-overhead launches of the small kernels that every step runs."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor


class Launcher:
    """Triton takes 15 to 40 us to look up the compiled kernel from a launch's arguments, several times as long as the
    launch itself. This caches the kernel, keyed by `like`: everything that Triton would look at, which is the
    arguments' types, the constants, and whether arguments that it specializes on are multiples of 16 or equal to 1.

    Launches on the current stream of the current device. One thread at a time.
    """

    def __init__(self, kernel: Any, num_warps: int) -> None:
        self._kernel = kernel
        self._num_warps = num_warps
        self._known: dict[Hashable, Any] = {}

    def __call__(self, like: Hashable, grid: tuple[int, int, int], *arguments: Any) -> None:
        """arguments: all of the kernel's, in its order."""
        if not self.again(like, grid, *[x.data_ptr() if isinstance(x, Tensor) else x for x in arguments]):
            compiled = self._kernel[grid](*arguments, num_warps=self._num_warps)
            if compiled is not None:  # Triton's interpreter compiles nothing
                self._known[like] = compiled

    def again(self, like: Hashable, grid: tuple[int, int, int], *arguments: Any) -> bool:
        """Launch the kernel if it is known, else return False. Takes addresses instead of tensors: for each tensor,
        Triton asks the driver whether the device can access it."""
        compiled = self._known.get(like)
        if compiled is not None:
            compiled[grid](*arguments)
        return compiled is not None
