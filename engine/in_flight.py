"""A step between its launch and its retirement."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.sequence import Sequence
from engine.step import Chunk, LaunchedStep
from engine.step_size import StepSize


@dataclass(frozen=True, slots=True)
class InFlight:
    """A launched step. `released`: block tables of sequences that have ended since, which the engine holds until the
    step retires."""

    chunks: list[Chunk]
    step: LaunchedStep
    size: StepSize
    decided: float  # when its turn began, by the engine's clock
    launch_s: float  # how long its launch took
    leaves_prompts: bool  # whether it leaves prompts unfinished, which the next step continues
    released: list[tuple[Sequence, list[int]]] = field(default_factory=list)
