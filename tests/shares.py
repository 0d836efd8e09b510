"""Which tests of `make test` go to the same parallel worker, and which begin first.

A share is a file, whose fixtures then live in one process, or all files that use one of the clusters of `tests/e2e`,
or a single test.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

CLUSTERS = {
    "fragile": (
        "test_client_leaves.py",
        "test_first_token.py",
        "test_leaks.py",
        "test_node_loss.py",
        "test_parameter_failover.py",
    ),
    "house": (
        *("test_benchmarks.py", "test_console.py", "test_grpc_client.py", "test_openai_client.py"),
        *(
            "test_max_logprobs.py",
            "test_other_apis.py",
            "test_parameter_combinations.py",
            "test_parameters.py",
            "test_parity.py",
            "test_structured_outputs.py",
            "test_timelines.py",
        ),
    ),
}
"""Fixtures of the session, and the files of `tests/e2e` that use them."""

ONE_BY_ONE = ("tests/node/test_gpu_ranks.py",)
"""Files of which each test is a share: it starts nodes of its own, and waits for them longer than it computes."""

LONGEST = (
    "tests/e2e/test_chaos.py",  # half a minute, however fast the machine
    "fragile",  # freezes and restarts nodes: it waits more than it computes
    *("tests/deploy/test_up.py", "tests/docs/test_readme.py", "house"),
    *("tests/protocol/test_simulation.py", "tests/tools/test_demo.py", "tests/e2e/test_membership.py"),
    *("tests/node/test_processes.py", "tests/fuzz/test_openapi.py", "tests/fuzz/test_many_at_once.py"),
)
"""Shares that take longest, in the order in which they begin."""


def share_of(test: str) -> str:
    """`test`: its id, or the path of its file in that."""
    path = test.partition("::")[0]
    if path in ONE_BY_ONE:
        return test
    folder, _, name = path.rpartition("/")
    if folder == "tests/e2e":
        return next((cluster for cluster, names in CLUSTERS.items() if name in names), path)
    return path


def rank_of(test: str) -> int:
    """Where it comes among all, which are otherwise in pytest's order."""
    share = share_of(test)
    return LONGEST.index(share) if share in LONGEST else len(LONGEST)


def part_of(folders: Iterable[Path], ignored: Sequence[Path], worker: int, num_workers: int) -> list[Path]:
    """The files with tests in `folders` that this worker imports first; each is one worker's."""
    found = sorted(file for folder in folders for file in folder.rglob("test_*.py"))
    files = [file for file in found if not any(file.is_relative_to(path) for path in ignored)]
    return files[len(files) * worker // num_workers : len(files) * (worker + 1) // num_workers]
