"""What a transport may leave behind, counted: threads, descriptors, GPU memory, shared memory."""

from __future__ import annotations

import gc
import os
import time
from dataclasses import astuple, dataclass
from pathlib import Path

import torch

WAIT_S = 1.0
_SHM = Path("/dev/shm")
_SYSV = Path("/proc/sysvipc/shm")
_LIBRARIES = ("ucx_", "nccl-")


@dataclass(frozen=True)
class Resources:
    """Of this process."""

    threads: int
    descriptors: int
    gpu_bytes: int

    @classmethod
    def now(cls) -> Resources:
        gc.collect()  # slots have memory, and descriptors, for as long as somebody refers to them
        gpu_bytes = 0
        if torch.cuda.is_initialized():
            gpu_bytes = sum(torch.cuda.memory_allocated(i) for i in range(torch.cuda.device_count()))
        return cls(len(list(Path("/proc/self/task").iterdir())), len(list(Path("/proc/self/fd").iterdir())), gpu_bytes)


NOTHING = Resources(0, 0, 0)
GPU_SLACK = Resources(8, 64, 0)
"""What CUDA, NCCL and the like may open once in the life of a process, at any time."""


def left_over(before: Resources, slack: Resources = NOTHING, wait_s: float = WAIT_S) -> str | None:
    """What is there more, or less, than before, also after `wait_s`; None: nothing beyond `slack`."""
    deadline = time.monotonic() + wait_s
    while not _like(now := Resources.now(), before, slack) and time.monotonic() < deadline:
        os.sched_yield()  # a thread that was joined may take a moment to leave
    return None if _like(now, before, slack) else f"{before} before, {now} after"


def _like(now: Resources, before: Resources, slack: Resources) -> bool:
    return all(abs(n - b) <= s for n, b, s in zip(astuple(now), astuple(before), astuple(slack), strict=True))


def orphans(pids: set[int | None]) -> list[str]:
    """Segments of shared memory that these processes made, or their libraries, and that nobody has mapped. Other tests
    may run beside this one: what is between its making and its mapping is not left behind."""
    deadline = time.monotonic() + WAIT_S
    while (found := _unmapped(pids)) and time.monotonic() < deadline:
        os.sched_yield()
    return found


def _unmapped(pids: set[int | None]) -> list[str]:
    found = []
    for line in _SYSV.read_text().splitlines()[1:] if _SYSV.exists() else []:
        _, shmid, _, _, creator, _, num_attached, *_ = line.split()
        if int(creator) in pids and num_attached == "0":
            found.append(f"SysV segment {shmid}")
    files = [path for path in _SHM.iterdir() if path.name.startswith(_LIBRARIES)]
    return found + [str(path) for path in files if path.name not in _mapped()]


def _mapped() -> str:
    """All mappings of all processes that this user may look at."""
    maps = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                maps.append((process / "maps").read_text())
            except OSError:
                continue  # it ended, or is not ours
    return "".join(maps)
