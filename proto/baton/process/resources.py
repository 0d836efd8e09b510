"""How many CPUs and how much memory this process may use.

The limits of a container or a systemd unit hide nothing: `os.cpu_count()`, the affinity and the size of the memory
remain the machine's. But the kernel stops all threads of a process that has used up its CPU quota for the rest of each
100 ms, and kills one that fills its limit of memory. Both are set for the process's cgroup or one above it, in the tree
of version 2 or in those of version 1 (man 7 cgroups); cgroups above a container's cannot be seen in it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")
_OCTAL = re.compile(r"\\([0-7]{3})")


def num_cpus(root: Path = ROOT) -> int:
    """How many threads can compute all the time: a quota of 2.5 CPUs counts as 2, since a third thread would have all
    three stopped; at least 1. root: of the file system."""
    there, quota = len(os.sched_getaffinity(0)), cpu_quota(root)
    return there if quota is None else max(1, min(there, int(quota)))


def cpu_quota(root: Path = ROOT) -> float | None:
    """Seconds of CPU time that this process may use each second, with the others of its cgroup; None: no limit."""
    quotas = [quota for folder in _cgroups("cpu", root) if (quota := _quota(folder)) is not None]
    return min(quotas, default=None)


def throttled_share(root: Path = ROOT) -> float:
    """The share of periods in which a cgroup of this process was stopped for using up its quota; of several, the
    highest."""
    return max(map(_throttled_share, _cgroups("cpu", root)), default=0.0)


def memory_bytes(root: Path = ROOT) -> int:
    """The memory that this process may use, with the others of its cgroup."""
    limits = [
        int(text)
        for folder in _cgroups("memory", root)
        for name in ("memory.max", "memory.limit_in_bytes")
        if (text := _text(folder / name)).isdecimal()
    ]
    return min([physical_memory_bytes(), *limits])


def physical_memory_bytes() -> int:
    """The machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _quota(folder: Path) -> float | None:
    words = _text(folder / "cpu.max").split() or [
        _text(folder / "cpu.cfs_quota_us"),
        _text(folder / "cpu.cfs_period_us"),
    ]
    has_quota = len(words) == 2 and all(word.isdecimal() and int(word) for word in words)
    return int(words[0]) / int(words[1]) if has_quota else None


def _throttled_share(folder: Path) -> float:
    found = dict(re.findall(r"^(nr_periods|nr_throttled) (\d+)$", _text(folder / "cpu.stat"), re.MULTILINE))
    periods = int(found.get("nr_periods", 0))
    return int(found.get("nr_throttled", 0)) / periods if periods else 0.0


def _cgroups(controller: str, root: Path) -> Iterator[Path]:
    """The folders of this process's cgroups that may limit what `controller` counts, and of those above them."""
    own: dict[str, PurePosixPath] = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), PurePosixPath(name))
    for line in _text(root / "proc/self/mountinfo").splitlines():
        mount, _, kind = line.partition(" - ")
        (_, _, _, mounted, point, *_), (version, *_, options) = mount.split(" "), kind.split(" ")
        has_controller = version == "cgroup2" or (version == "cgroup" and controller in options.split(","))
        path = own.get("" if version == "cgroup2" else controller)
        if has_controller and path is not None:
            yield from _upwards(root / _unescaped(point).lstrip("/"), path, PurePosixPath(_unescaped(mounted)))


def _upwards(point: Path, path: PurePosixPath, mounted: PurePosixPath) -> Iterator[Path]:
    """The folder of the cgroup `path`, and those above it, where the tree is mounted at `point` from its cgroup
    `mounted` on. A cgroup that is not below that one is not to be seen: only the tree's beginning."""
    inside = path.relative_to(mounted).parts if path.is_relative_to(mounted) else ()
    for depth in range(0 if ".." in inside else len(inside), -1, -1):
        yield point.joinpath(*inside[:depth])


def _unescaped(path: str) -> str:
    """A path of mountinfo, which writes blanks as \\040."""
    return _OCTAL.sub(lambda found: chr(int(found[1], 8)), path)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="surrogateescape").strip()
    except OSError:
        return ""
