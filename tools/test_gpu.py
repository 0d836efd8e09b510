"""The tests of `make test-gpu`: those marked gpu, in several processes, since compilers take most of their time.

Tests that measure the GPU run first, with nothing else on it; then the folders below and all other tests run
concurrently. Ends with one line for each reason why tests were skipped, and one with the total counts.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ALONE = ("tests/engine/test_memory.py", "tests/benchmarks")
TOGETHER = ("tests/kernels/test_paged_attention_kernels.py", "tests/kernels", "tests/kv_transfer")
"""Folders and files of the groups; what is in none of them is one more."""
TIMEOUT_S = 1200.0
NO_TESTS = 5
"""pytest's exit code if no test was selected."""

_SKIPPED = re.compile(r"^SKIPPED \[(\d+)\] \S+ (.*)$", re.MULTILINE)
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")


def main(extra: list[str]) -> int:
    """`extra` is passed to pytest. Returns 0 if tests ran and all of them passed."""
    began = time.monotonic()
    left = marked_paths()
    groups = []
    for parts in (ALONE, *((part,) for part in TOGETHER), ("tests",)):
        groups.append([path for path in left if path.startswith(parts)])
        left = [path for path in left if path not in groups[-1]]
    done = [run(groups[0], extra)]
    with ThreadPoolExecutor(len(groups)) as pool:
        done += pool.map(lambda group: run(group, extra), filter(None, groups[1:]))
    output = "\n".join(text for _, text in done)
    counts: Counter[str] = Counter()
    for _, text in done:
        counts.update({word.rstrip("s"): int(count) for count, word in _COUNT.findall(text.strip().splitlines()[-1])})
    skips: Counter[str] = Counter()
    for count, reason in _SKIPPED.findall(output):
        skips[reason] += int(count)
    for reason, count in skips.most_common():
        print(f"{count} skipped: {reason}")
    total = ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
    print(f"{total} in {time.monotonic() - began:.0f} s")
    return 0 if all(code in (0, NO_TESTS) for code, _ in done) and counts["passed"] else 1


def marked_paths() -> list[str]:
    """Test files that mark a test, and the folders whose conftest does; the others may need dependencies that GPU
    machines do not have."""
    found = [path for path in sorted((ROOT / "tests").rglob("*.py")) if "pytest.mark.gpu" in path.read_text()]
    folders = {path.parent for path in found if path.name == "conftest.py"}
    paths = folders | {path for path in found if not folders & set(path.parents)}
    return sorted(str(path.relative_to(ROOT)) for path in paths)


def run(paths: list[str], extra: list[str]) -> tuple[int, str]:
    """pytest's exit code and output, which is also printed once it has ended."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", *extra, *paths]
    process = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S, check=False
    )
    print(process.stdout, flush=True)
    return process.returncode, process.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
