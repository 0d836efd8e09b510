"""Checks of what the system, or a container, lets a process have."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from baton.process import resources
from deploy.doctor.finding import Finding, failure, ok, warning
from deploy.doctor.settings import DoctorSettings
from kv_transfer.transports.host import rdma_devices

STATUS = Path("/proc/self/status")
SHM = "/dev/shm"
MIB, GIB = 1 << 20, 1 << 30

FEW_FILES = 4096
"""A router opens a socket for each client, a node some for each peer."""
TOO_FEW_FILES = 512
SMALL_SHM_BYTES = 256 * MIB
"""Docker gives 64 MiB; the queues of a few processes need more (`kv_transfer/transports/ucx/path.py`)."""
SMALL_MEMORY_BYTES = 4 * GIB
_IPC_LOCK = 1 << 14


@dataclass(frozen=True, slots=True)
class Wish:
    """CPUs that a process should have, and what for."""

    num_cpus: int
    reason: str


def findings(settings: DoctorSettings) -> Iterator[Finding]:
    yield open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield locked_memory(soft, can_lock_memory(), rdma_devices())
    yield shared_memory(shm_bytes())
    affinity, quota = len(os.sched_getaffinity(0)), resources.cpu_quota()
    allowed = affinity if quota is None else min(affinity, quota)
    yield cpus(allowed, resources.throttled_share(), wish(settings))
    yield memory(resources.memory_bytes(), resources.physical_memory_bytes())


def open_files(soft: int, hard: int) -> Finding:
    """baton raises the soft limit to the hard one."""
    check, most = "open files", _amount(hard)
    if hard == resource.RLIM_INFINITY or hard >= FEW_FILES:
        return ok(check, f"A process may open {most} files (ulimit -Hn; {_amount(soft)} before baton raises it).")
    do = "Raise it: LimitNOFILE=1048576 in a unit, --ulimit nofile=1048576 for a container."
    text = f"A process may open only {most} files (ulimit -Hn), and each client of a router takes one."
    return failure(check, text, do) if hard < TOO_FEW_FILES else warning(check, text, do)


def locked_memory(soft: int, can_lock: bool, rdma: tuple[str, ...]) -> Finding:
    """Memory that an RDMA device reads and writes is locked."""
    check = "locked memory"
    if soft == resource.RLIM_INFINITY or can_lock:
        return ok(check, "A process may lock as much memory as it likes (ulimit -l, or the capability IPC_LOCK).")
    text = f"A process may lock only {soft / MIB:.0f} MiB of memory (ulimit -l), and lacks the capability IPC_LOCK"
    if not rdma:
        return ok(check, f"{text}; only RDMA needs it, and there is no such device.")
    do = "Add --ulimit memlock=-1 --cap-add IPC_LOCK to the container, LimitMEMLOCK=infinity to a unit."
    return failure(check, f"{text}, which {', '.join(rdma)} needs for staging slots.", do)


def shared_memory(num_bytes: int | None) -> Finding:
    check = "/dev/shm"
    if num_bytes is None:
        return failure(check, "There is no /dev/shm.", "Mount a tmpfs there: shared memory and NCCL need it.")
    if num_bytes >= SMALL_SHM_BYTES:
        return ok(check, f"/dev/shm has {num_bytes / GIB:.1f} GiB left.")
    text = f"/dev/shm has only {num_bytes / MIB:.0f} MiB left, which UCX's shared memory and NCCL exceed."
    do = "Start the container with --shm-size=1g or --ipc=host; in Kubernetes mount an emptyDir of medium Memory."
    return failure(check, text, do)


def wish(settings: DoctorSettings) -> Wish:
    """Of the process that needs most: a node, or a router with these settings."""
    ranks = settings.tensor_parallel_size * settings.pipeline_parallel_size // settings.nnodes
    wishes = [
        Wish(2, "a node has an engine thread and a network thread"),
        Wish(ranks, "ranks wait for each other in every step (--tensor-parallel-size, --pipeline-parallel-size)"),
        Wish(ranks * (settings.cpu_threads or 1), "each rank computes with the threads of --cpu-threads"),
        Wish(settings.workers, "each process of a router's --workers uses up to one"),
    ]
    return max(wishes, key=lambda wish: wish.num_cpus)


def cpus(allowed: float, throttled_share: float, wanted: Wish) -> Finding:
    """allowed: by the affinity and the quota. throttled_share: of all periods of the quota, those in which it was used
    up."""
    check, text = "CPU", f"{allowed:g} of {os.cpu_count()} CPUs may be used"
    if throttled_share > 0.05:
        do = "Raise the container's CPU limit, or remove it: a stopped router or engine thread stops every stream."
        return warning(check, f"{text}, and {throttled_share:.0%} of all periods were cut short.", do)
    if allowed < wanted.num_cpus:
        return warning(check, f"{text}.", f"Give it {wanted.num_cpus} or more: {wanted.reason}.")
    return ok(check, f"{text}.")


def memory(limit: int, physical_bytes: int) -> Finding:
    text = f"{limit / GIB:.1f} of {physical_bytes / GIB:.1f} GiB of memory may be used."
    if limit < SMALL_MEMORY_BYTES:
        do = "Raise the container's memory limit: loading a checkpoint needs room for its largest file."
        return warning("memory", text, do)
    return ok("memory", text)


def can_lock_memory() -> bool:
    """Whether this process has the capability IPC_LOCK."""
    for line in _text(STATUS).splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) & _IPC_LOCK)
    return False


def shm_bytes() -> int | None:
    try:
        stat = os.statvfs(SHM)
    except OSError:
        return None
    return stat.f_bavail * stat.f_frsize


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _amount(limit: int) -> str:
    return "any number of" if limit == resource.RLIM_INFINITY else f"{limit:,}"
