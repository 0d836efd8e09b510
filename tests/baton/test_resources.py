"""The CPUs and the memory that a process may use, by the files of the kernel."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from baton.process import resources
from baton.process.resources import cpu_quota, memory_bytes, num_cpus, physical_memory_bytes, throttled_share

GIB = 1 << 30
V2 = "30 24 0:27 {mounted} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1_CPU = "32 31 0:29 {mounted} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"
V1_MEMORY = "35 31 0:32 {mounted} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
OTHER = "22 1 254:0 / / rw,relatime - ext4 /dev/vda rw"


class Files:
    """A root folder with files of the kernel."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def kernel(self, cgroup: str, *mounts: str) -> Files:
        return self.write("proc/self", cgroup=cgroup, mountinfo="\n".join([OTHER, *mounts]))

    def write(self, folder: str, **files: str) -> Files:
        path = self.root / folder
        path.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (path / name.replace("__", ".")).write_text(f"{text}\n")
        return self


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    monkeypatch.setattr(resources, "physical_memory_bytes", lambda: 256 * GIB)
    return Files(tmp_path)


def test_a_container_of_version_2(files: Files) -> None:
    files.kernel("0::/", V2.format(mounted="/"))
    stat = "usage_usec 5\nnr_periods 100\nnr_throttled 40\nthrottled_usec 7"
    files.write("sys/fs/cgroup", cpu__max="250000 100000", memory__max=str(2 * GIB), cpu__stat=stat)
    assert (cpu_quota(files.root), num_cpus(files.root), memory_bytes(files.root)) == (2.5, 2, 2 * GIB)
    assert throttled_share(files.root) == 0.4


def test_the_lowest_limit_of_a_cgroup_and_those_above_it_counts(files: Files) -> None:
    """A unit of systemd, in a slice."""
    files.kernel("0::/baton.slice/baton-router.service", V2.format(mounted="/"))
    files.write("sys/fs/cgroup/baton.slice/baton-router.service", cpu__max="max 100000", memory__max=str(8 * GIB))
    files.write("sys/fs/cgroup/baton.slice", cpu__max="300000 100000", memory__max=str(4 * GIB))
    assert (num_cpus(files.root), memory_bytes(files.root)) == (3, 4 * GIB)
    files.write("sys/fs/cgroup/baton.slice/baton-router.service", cpu__max="50000 50000", memory__max="max")
    assert (num_cpus(files.root), memory_bytes(files.root)) == (1, 4 * GIB)


def test_version_1_as_in_a_container_that_sees_only_its_own_folders(files: Files) -> None:
    """Its names in /proc are the host's, and what is mounted begins at its own cgroup."""
    cgroup = "9:name=systemd:/docker/42\n4:memory:/docker/42\n2:cpu,cpuacct:/docker/42\n0::/"
    files.kernel(cgroup, V1_CPU.format(mounted="/docker/42"), V1_MEMORY.format(mounted="/docker/42"))
    files.write("sys/fs/cgroup/cpu,cpuacct", cpu__cfs_quota_us="400000", cpu__cfs_period_us="100000")
    files.write("sys/fs/cgroup/memory", memory__limit_in_bytes=str(GIB))
    assert (num_cpus(files.root), memory_bytes(files.root)) == (4, GIB)


def test_version_1_without_limits(files: Files) -> None:
    files.kernel("4:memory:/\n2:cpu,cpuacct:/", V1_CPU.format(mounted="/"), V1_MEMORY.format(mounted="/"))
    files.write("sys/fs/cgroup/cpu,cpuacct", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    files.write("sys/fs/cgroup/memory", memory__limit_in_bytes="9223372036854771712")
    assert (cpu_quota(files.root), num_cpus(files.root), memory_bytes(files.root)) == (None, 64, 256 * GIB)


def test_a_cgroup_above_the_mounted_ones_cannot_be_seen(files: Files) -> None:
    """Of a process that has been moved out of its namespace, for one."""
    files.kernel("0::/../other", V2.format(mounted="/"))
    files.write("sys/fs/cgroup", cpu__max="200000 100000")
    files.write("sys/fs/other", cpu__max="100000 100000")
    assert num_cpus(files.root) == 2


def test_a_quota_below_one_cpu_leaves_one_thread_and_a_high_one_changes_nothing(files: Files) -> None:
    files.kernel("0::/", V2.format(mounted="/"))
    assert num_cpus(files.write("sys/fs/cgroup", cpu__max="20000 100000").root) == 1
    assert num_cpus(files.write("sys/fs/cgroup", cpu__max="9900000 100000").root) == 64


@pytest.mark.parametrize("text", ["", "max", "0 0", "-1 100000", "many 100000", "100000 100000 100000"])
def test_what_is_no_limit(files: Files, text: str) -> None:
    files.kernel("0::/", V2.format(mounted="/")).write("sys/fs/cgroup", cpu__max=text, memory__max=text)
    assert (num_cpus(files.root), memory_bytes(files.root)) == (64, 256 * GIB)


def test_without_cgroups_there_is_what_the_machine_has(tmp_path: Path) -> None:
    assert num_cpus(tmp_path) == len(os.sched_getaffinity(0))
    assert memory_bytes(tmp_path) == physical_memory_bytes() > 0
    assert throttled_share(tmp_path) == 0.0


def test_a_mount_with_blanks_in_its_path(files: Files) -> None:
    files.kernel("0::/", V2.format(mounted="/").replace("/sys/fs/cgroup", "/my\\040cgroups"))
    assert num_cpus(files.write("my cgroups", cpu__max="200000 100000").root) == 2


def test_this_process_has_some() -> None:
    assert 1 <= num_cpus() <= len(os.sched_getaffinity(0))
    assert 0 < memory_bytes() <= physical_memory_bytes()
