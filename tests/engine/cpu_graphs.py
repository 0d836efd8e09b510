"""Stand-ins for CUDA graphs, on a CPU: they compute their step when they are replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.model import graphs
from engine.model.layer_marks import SeesLayers


class OpByOp(graphs._Capture):
    """A capture that records nothing."""

    def __init__(
        self, begin: Callable[[], None], forward: Any, state: Any, group_ends: tuple[int, ...], most_logits: int
    ) -> None:
        self.begin, self.forward = begin, forward
        self.state, self.group_ends, self.most_logits = state, group_ends, most_logits

    def __call__(
        self, step: Callable[[SeesLayers | None], Tensor], group_ends: tuple[int, ...] = ()
    ) -> tuple[Any, Tensor]:
        logits = step(None).clone()

        class Replayed:
            def replay(self, marks: SeesLayers | None = None) -> None:
                logits.copy_(step(marks))

        return Replayed(), logits


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_Capture", OpByOp)
    monkeypatch.setattr(graphs, "upload_to", lambda out, array: out.copy_(torch.from_numpy(array)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
