"""Changes to a model's modules, which can be undone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass(slots=True)
class Patches:
    """Sets forwards on single modules, which are otherwise unchanged."""

    undo: list[Callable[[], None]] = field(default_factory=list)

    def set_forward(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        before = module.__dict__.get("forward")
        module.forward = forward

        def restore() -> None:
            if before is None:
                del module.forward
            else:
                module.forward = before

        self.undo.append(restore)

    def mark(self) -> int:
        """The current state, to go back to later."""
        return len(self.undo)

    def back_to(self, mark: int) -> None:
        while len(self.undo) > mark:
            self.undo.pop()()
