"""How long a step waits when experts of a layer change places: `python -m benchmarks.layers.expert_moves`.

Two ranks as processes of this machine exchange experts, as `--enable-eplb` has them do between two steps; the weights
must be those of the experts then. The ceiling is the time in which one process copies as many bytes in memory once.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore

from baton.settings import Settings, parse
from benchmarks.harness.checks import WrongAnswers
from benchmarks.harness.tables import Table
from engine.model.parallel.expert_slots import ExpertSlots
from engine.model.parallel.group import GlooRanks

_END_S = 600.0


class MovesSettings(Settings):
    """Measures exchanges of experts between two ranks."""

    prog: ClassVar[str] = "benchmarks.layers.expert_moves"

    hidden_size: int = Field(2048, ge=1, description="of the model; those of Qwen3-30B-A3B are the defaults")
    intermediate_size: int = Field(768, ge=1, description="of an expert")
    num_experts: int = Field(32, ge=2, multiple_of=2, description="of the layer")
    moved: str = Field("1,4,16", description="experts that each rank gets from the other at a time, as N,N,...")
    rounds: int = Field(5, ge=1, description="exchanges of each kind, of which the median is told")


class _Experts(nn.Module):
    """As transformers keeps them. Each weight is the number of its expert."""

    def __init__(self, numbers: Sequence[int], hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        values = torch.tensor(numbers, dtype=torch.float32)[:, None, None]
        self.gate_up_proj = nn.Parameter(values.repeat(1, 2 * intermediate_size, hidden_size), requires_grad=False)
        self.down_proj = nn.Parameter(values.repeat(1, hidden_size, intermediate_size), requires_grad=False)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        raise NotImplementedError


def exchanges(settings: MovesSettings, rank: int, meeting: Path) -> list[dict[str, Any]]:
    """What rank 0 has measured. Raises WrongAnswers."""
    torch.set_num_threads(1)
    group = GlooRanks(FileStore(str(meeting), 2), rank, 2)
    size = settings.num_experts // 2
    module = _Experts(range(rank * size, (rank + 1) * size), settings.hidden_size, settings.intermediate_size)
    slots = ExpertSlots(0, module, group, settings.num_experts)
    expert_bytes = sum(parameter[0].nbytes for parameter in module.parameters())
    rows = []
    for moved in map(int, settings.moved.split(",")):
        took = sorted(_exchange(slots, module, group, moved) for _ in range(settings.rounds))
        copied_s = _copy_s(2 * moved * expert_bytes)
        seconds = took[len(took) // 2]
        row = {"moved": moved, "mib": round(2 * moved * expert_bytes / 2**20, 1), "ms": round(seconds * 1e3, 2)}
        rows.append(row | {"copy_ms": round(copied_s * 1e3, 2), "ratio": round(seconds / copied_s, 2)})
    return rows


def _exchange(slots: ExpertSlots, module: _Experts, group: GlooRanks, moved: int) -> float:
    """Both ranks exchange their first experts; until both are done, in seconds."""
    size = len(module.down_proj)
    new = slots.placement.copy()
    new[:moved], new[size : size + moved] = slots.placement[size : size + moved], slots.placement[:moved]
    group.minimum(0)
    began = time.perf_counter()
    slots.rearrange(new)
    group.minimum(0)
    took_s = time.perf_counter() - began
    own = torch.from_numpy(new.reshape(2, -1)[group.rank].astype(np.float32))
    if not all((parameter == own[:, None, None]).all() for parameter in module.parameters()):
        raise WrongAnswers("a slot has the weights of another expert")
    return took_s


def _copy_s(num_bytes: int) -> float:
    source, target = torch.zeros(num_bytes, dtype=torch.uint8), torch.ones(num_bytes, dtype=torch.uint8)
    took = []
    for _ in range(3):
        began = time.perf_counter()
        target.copy_(source)
        took.append(time.perf_counter() - began)
    return min(took)


def main(args: Sequence[str] | None = None) -> None:
    """Prints a table, and then a line of JSON."""
    settings = parse(MovesSettings, sys.argv[1:] if args is None else args)
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "meeting"
        other = multiprocessing.get_context("spawn").Process(target=exchanges, args=(settings, 1, meeting), daemon=True)
        other.start()
        rows = exchanges(settings, 0, meeting)
        other.join(_END_S)
        if other.exitcode:
            raise WrongAnswers("rank 1 has failed")
    report(rows)


def report(rows: list[dict[str, Any]]) -> None:
    columns = {"moved": "experts each way", "mib": "MiB", "ms": "ms", "copy_ms": "copy, ms", "ratio": "ratio"}
    print(Table(list(columns.values()), [[f"{row[key]:g}" for key in columns] for row in rows]).plain())
    print(json.dumps({"benchmark": "expert_moves", "rows": rows}))


if __name__ == "__main__":
    main()
