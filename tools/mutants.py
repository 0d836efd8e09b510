"""Mutation testing: breaks the code in one place at a time, as a refactoring may, and runs tests that must fail.

`tools/mutations/*.toml` is the table of mutations, one file for each top-level package. An entry:

    file, old, new   the file, a text that it contains exactly once, and the replacement
    why              what is wrong afterwards, i.e. what a test must detect
    rule             the rule of docs/protocol.md that the mutation breaks, if it breaks one (see `rules`)
    tests            files or tests of the same folder, at least one of which must fail; a hang counts as a failure
    survives         why no test needs to detect it

Everything runs in copies of the working tree. A test run is a fork of this process, which has imported the slow
dependencies but none of our own modules.

    python tools/mutants.py --check           only report entries that no longer fit the tree
    python tools/mutants.py --folder router   also: --only TEXT (in file, place or reason), --jobs N
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLES = ROOT / "tools" / "mutations"
PROTOCOL = ROOT / "docs" / "protocol.md"
ENOUGH = 0.95
TEST_LIMIT_S = 60
"""Timeout of one test, which then fails."""
RUN_LIMIT_S = 180
"""Timeout of all tests of an entry, which are then killed."""
SURVIVED = "SURVIVED"
CANNOT_RUN = (4, 5)
"""Pytest's exit statuses for usage errors and for no tests."""
BROKE = 99
"""The exit status of a run that failed before pytest exited."""
OPTIONS = [
    *("-x", "-q", "-m", "not gpu and not full", f"--timeout={TEST_LIMIT_S}"),
    *(
        "-p",
        "no:cacheprovider",
        "-p",
        "pytest_asyncio.plugin",
        "-p",
        "pytest_timeout",
        "-p",
        "_hypothesis_pytestplugin",
    ),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # it is already imported
]
PRELOADED = (
    *("grpc.aio", "hypothesis.stateful", "numpy", "prometheus_client", "pydantic_settings", "pytest", "pytest_asyncio"),
    *("torch", "transformers"),
)
"""Third-party modules that take seconds to import."""


@dataclass(frozen=True)
class Mutation:
    """One entry of the table. Raises TypeError for an unknown field."""

    file: str
    old: str
    new: str
    why: str
    tests: Sequence[str]
    rule: str = ""
    survives: str = ""

    @property
    def folder(self) -> str:
        """The package that the file belongs to, by which results are grouped."""
        parts = Path(self.file).parts
        return parts[1] if parts[0] in ("proto", "kernels") else parts[0]

    def __str__(self) -> str:
        return f"{self.file}: {' '.join(self.old.split())[:60]!r}: {self.why}"


def load() -> list[Mutation]:
    entries = []
    for table in sorted(TABLES.glob("*.toml")):
        entries += [Mutation(**entry) for entry in tomllib.loads(table.read_text())["mutation"]]
    return entries


_NUMBERED = (
    ("identity", "rules of identity"),
    ("handoff", "rules of the handoff"),
    ("moving", "moving a running request"),
)


def rules() -> list[str]:
    """The requirements of `docs/protocol.md`: its numbered rules ("identity 2", "moving 4"), the bullets of "KV
    blocks" ("blocks 1"), and the rows of "When something goes wrong" by their first cell."""
    text = PROTOCOL.read_text()
    sections = {title.lower(): body for title, body in re.findall(r"(?ms)^## (.*?)\n(.*?)(?=^## |\Z)", text)}
    found = []
    for name, section in _NUMBERED:
        found += [f"{name} {number}" for number in re.findall(r"(?m)^(\d+)\. ", sections[section])]
    points = re.findall(r"(?m)^- ", sections["kv blocks"].split("###")[0])
    found += [f"blocks {number + 1}" for number in range(len(points))]
    rows = re.findall(r"(?m)^\| ([^|]+?) \|", sections["when something goes wrong"])
    return found + [row for row in rows if row != "what happens" and not row.startswith("-")]


# ---- check of the table against the tree ----


def stale(mutations: Iterable[Mutation], root: Path = ROOT) -> Iterator[str]:
    """A message for each problem of an entry."""
    for mutation in mutations:
        path = root / mutation.file
        count = path.read_text().count(mutation.old) if path.exists() else 0
        if count != 1:
            yield f"{mutation}: the old text is there {count} times"
        elif mutation.new == mutation.old:
            yield f"{mutation}: changes nothing"
        for test in mutation.tests:
            file, _, name = test.partition("::")
            have = (root / file).read_text() if (root / file).exists() else ""
            if not have or not re.search(rf"\b{re.escape(name)}\b", have):
                yield f"{mutation}: there is no {test}"


# ---- trees, and test runs in them ----


def copy_tree(to: Path) -> None:
    """Copy the files of the working tree that git tracks or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True, text=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


class Run:
    """A test run in a tree, in its own process group."""

    def __init__(self, tree: Path, tests: Sequence[str], instead: Callable[[], object] | None = None) -> None:
        """`instead`: what to run in place of the tests."""
        self.output = tree / ".mutants.out"
        self.begun = time.monotonic()
        self.deadline = self.begun + RUN_LIMIT_S
        self.pid = os.fork()
        if self.pid == 0:
            _become(instead or partial(_run_pytest, tree, tests), self.output)
        with contextlib.suppress(OSError):  # the child also does this; either may be first
            os.setpgid(self.pid, self.pid)
        self.fd = os.pidfd_open(self.pid)

    @property
    def has_ended(self) -> bool:
        return bool(select.select([self.fd], [], [], 0)[0])

    @property
    def is_over(self) -> bool:
        """Whether it has ended or reached its deadline."""
        return self.has_ended or time.monotonic() >= self.deadline

    def finish(self) -> int | None:
        """Pytest's exit status; None if it had to be killed. Also kills the processes that it started."""
        ended = self.has_ended
        with contextlib.suppress(ProcessLookupError):  # it has ended and left no processes
            os.killpg(self.pid, signal.SIGKILL)
        os.close(self.fd)
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status) if ended else None


def _become(task: Callable[[], object], output: Path) -> None:
    """Run `task` in its own process group, with its output in a file. Never returns."""
    try:
        os.setpgid(0, 0)
        out = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        task()
    except BaseException:  # noqa: BLE001 - a fork must not continue as its parent
        traceback.print_exc()
    os._exit(BROKE)


def _run_pytest(tree: Path, tests: Sequence[str]) -> None:
    os.chdir(tree)
    paths = [str(tree), str(tree / "proto"), str(tree / "kernels")]
    sys.path[:] = paths + [path for path in sys.path if not Path(path).resolve().is_relative_to(ROOT / "tools")]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    import pytest

    os._exit(pytest.main([*OPTIONS, *tests]))


class Tree:
    """A copy with at most one mutation. `pyc` files stay valid since each version of a file has its own mtime."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._undo: tuple[Path, bytes, os.stat_result] | None = None

    def mutate(self, mutation: Mutation, number: int) -> None:
        path = self.path / mutation.file
        self._undo = path, path.read_bytes(), path.stat()
        path.write_text(path.read_text().replace(mutation.old, mutation.new))
        os.utime(path, (number, number))

    def restore(self) -> None:
        if self._undo:
            path, text, stat = self._undo
            path.write_bytes(text)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def wait(runs: Sequence[Run]) -> None:
    """Wait until a run has ended or reached its deadline."""
    limit = max(0.0, min(run.deadline for run in runs) - time.monotonic())
    select.select([run.fd for run in runs], [], [], limit)


def survivors(trees: list[Tree], mutations: Sequence[Mutation]) -> list[Mutation]:
    """The mutations that no test detected. Prints each result as it becomes available."""
    todo, busy, free = list(enumerate(mutations, 1)), dict[Tree, tuple[Run, Mutation]](), list(trees)
    alive = []
    try:
        while todo or busy:
            while todo and free:
                number, mutation = todo.pop(0)
                tree = free.pop()
                tree.mutate(mutation, number)
                busy[tree] = Run(tree.path, mutation.tests), mutation
            wait([run for run, _ in busy.values()])
            for tree, (run, mutation) in [(tree, it) for tree, it in busy.items() if it[0].is_over]:
                del busy[tree]
                if verdict(run, mutation) == SURVIVED:
                    alive.append(mutation)
                tree.restore()
                free.append(tree)
    finally:
        for run, _ in busy.values():
            run.finish()
    return alive


def verdict(run: Run, mutation: Mutation) -> str:
    """Print and return the mutation's outcome. Raises SystemExit if pytest could not run the tests at all."""
    status, took_s = run.finish(), time.monotonic() - run.begun
    if status in CANNOT_RUN:
        raise SystemExit(f"{mutation}: pytest said {status}\n{run.output.read_text()[-2000:]}")
    said = "hung" if status is None else SURVIVED if status == 0 else "killed"
    print(f"{said:8} {took_s:5.1f} s  {mutation}", flush=True)
    return said


def report(mutations: Sequence[Mutation], alive: Sequence[Mutation]) -> float:
    """Print the table, with the number of killed mutations in the last line. Returns their share."""
    print(f"\n{'folder':14} {'mutations':>9} {'killed':>7} {'survived':>9}")
    for folder in sorted({mutation.folder for mutation in mutations}):
        there = [mutation for mutation in mutations if mutation.folder == folder]
        num_alive = sum(mutation in alive for mutation in there)
        print(f"{folder:14} {len(there):9} {len(there) - num_alive:7} {num_alive:9}")
    for mutation in alive:
        print(f"survived: {mutation}\n    {mutation.survives or 'no test sees it: one is missing'}")
    share = 1 - len(alive) / len(mutations)
    print(f"{len(mutations) - len(alive)} of {len(mutations)} killed ({share:.0%})")
    return share


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="breaks the code, one place at a time, and runs tests that see it")
    parser.add_argument("--check", action="store_true", help="only whether the table fits the tree")
    parser.add_argument("--folder", default="", help="only mutations of this one")
    parser.add_argument("--only", default="", help="only those with this text in their file, place or reason")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time, each in a copy of the tree")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    mutations = [m for m in load() if options.folder in ("", m.folder) and options.only in str(m)]
    if wrong := list(stale(mutations)):
        print("\n".join(wrong), f"{len(wrong)} entries do not fit the tree", sep="\n")
        return 2
    if options.check or not mutations:
        print(f"{len(mutations)} mutations fit the tree")
        return 0 if mutations else 2
    os.environ["CI"] = "1"  # hypothesis draws the same examples each time and keeps none
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    for name in PRELOADED:
        importlib.import_module(name)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all blocks clean up
    with tempfile.TemporaryDirectory(prefix="baton-mutants-") as folder:
        trees = [Tree(Path(folder) / str(job)) for job in range(options.jobs)]
        for tree in trees:
            copy_tree(tree.path)
        first = Run(trees[0].path, sorted({test for mutation in mutations for test in mutation.tests}))
        first.deadline += 3600
        wait([first])
        if (status := first.finish()) != 0:
            print(first.output.read_text()[-4000:], f"the tests do not pass as it is: pytest said {status}", sep="\n")
            return 2
        return 0 if report(mutations, survivors(trees, mutations)) >= ENOUGH else 1


if __name__ == "__main__":
    sys.exit(main())
