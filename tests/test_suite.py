"""What the tests themselves stand on: processes that are forked, shares of parallel workers, budgets."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests import shares, summary
from tests.deploy.spawned import python_path, wait_for_end
from tests.fork_server import ROOT, ForkedProcess, ForkServer, OwnForkServer, SharedForkServer, connected

WAIT_S = 30.0
TESTS = ROOT / "tests"


# ---- the fork server ----


@pytest.fixture(scope="module", params=["own", "shared"])
def server(request: pytest.FixtureRequest) -> Iterator[ForkServer]:
    with ExitStack() as stack:
        if request.param == "own":
            server: ForkServer = OwnForkServer(["json"])
        else:
            shared = SharedForkServer(["json"])
            stack.callback(shared.close)
            server = connected(shared.address)
        stack.callback(server.close)
        yield server


def start(server: ForkServer, folder: Path, program: str, *arguments: str) -> ForkedProcess:
    """As a module in `folder`; what it writes goes into `out` and `err` there."""
    (folder / "program.py").write_text(program)
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        return server.start("program", arguments, env={"ONLY": "this"}, cwd=folder, stdout=out, stderr=err)


def test_a_forked_process_is_like_one_from_the_command_line(server: ForkServer, tmp_path: Path) -> None:
    program = """
import os, sys, threading
print(__name__, sys.argv, dict(os.environ), os.getcwd(), "json" in sys.modules, repr(sys.stdin.read()))
print(sorted(os.listdir("/proc/self/fd")), file=sys.stderr)
threading.Timer(0.05, print, ["after main"]).start()
sys.exit(7)
"""
    (beside := tmp_path / "beside").mkdir()
    other = start(server, beside, "import signal; signal.pause()")
    process = start(server, tmp_path, program, "an", "argument")
    assert process.wait(WAIT_S) == 7
    other.kill()
    assert other.wait(WAIT_S) == -signal.SIGKILL
    assert process.poll() == process.returncode == 7
    first, second = (tmp_path / "out").read_text().splitlines()
    argv = [str(tmp_path / "program.py"), "an", "argument"]
    assert first == f"__main__ {argv} {{'ONLY': 'this'}} {tmp_path} True ''"
    assert second == "after main"
    assert (tmp_path / "err").read_text() == "['0', '1', '2', '3']\n"  # 3 is the folder that is listed


def test_its_failure_is_told(server: ForkServer, tmp_path: Path) -> None:
    assert start(server, tmp_path, "1 / 0").wait(WAIT_S) == 1
    assert "ZeroDivisionError" in (tmp_path / "err").read_text()


def test_it_ends_in_order_but_takes_nothing_down(server: ForkServer, tmp_path: Path) -> None:
    program = """
import atexit, sys
class Kept:
    def __del__(self):
        print("taken down")
kept = Kept()
atexit.register(print, "at exit")
sys.exit("why")
"""
    assert start(server, tmp_path, program).wait(WAIT_S) == 1
    assert [(tmp_path / name).read_text() for name in ("out", "err")] == ["at exit\n", "why\n"]


def test_it_can_be_killed_and_waited_for(server: ForkServer, tmp_path: Path) -> None:
    process = start(server, tmp_path, "import signal; signal.pause()")
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.send_signal(signal.SIGSTOP)
    process.kill()
    assert process.wait(WAIT_S) == -signal.SIGKILL
    process.kill()  # and nobody else who has its pid now


PARENT = """
import signal, sys
from pathlib import Path
from tests.fork_server import OwnForkServer, connected

server = connected(bytes.fromhex(sys.argv[2])) if sys.argv[2] else OwnForkServer([])
process = server.start("program", [], env={}, cwd=Path(sys.argv[1]), stdout=1, stderr=2)
print(process.pid, flush=True)
signal.pause()
"""


@pytest.fixture(params=["own", "shared"])
def shared_address(request: pytest.FixtureRequest) -> Iterator[str]:
    """As the program above takes it."""
    if request.param == "own":
        yield ""
    else:
        with closing(SharedForkServer([])) as shared:
            yield shared.address.hex()


def test_it_does_not_outlive_the_test_process(tmp_path: Path, shared_address: str) -> None:
    (tmp_path / "program.py").write_text("import signal; signal.pause()")
    command = [sys.executable, "-c", PARENT, str(tmp_path), shared_address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=python_path()) as parent:
        assert parent.stdout
        pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
        parent.wait(WAIT_S)
        wait_for_end(pid)


# ---- shares and budgets ----


@pytest.mark.parametrize("cluster", shares.CLUSTERS)
def test_tests_of_a_shared_cluster_run_in_one_worker(cluster: str) -> None:
    wanted = re.compile(rf"\b{cluster}: ")
    users = {path.name for path in (TESTS / "e2e").glob("test_*.py") if wanted.search(path.read_text())}
    assert users == set(shares.CLUSTERS[cluster])
    assert {shares.share_of(f"tests/e2e/{name}") for name in users} == {cluster}


def test_tests_with_nodes_of_their_own_need_not_run_in_one_worker() -> None:
    assert all((ROOT / path).is_file() for path in shares.ONE_BY_ONE)
    one, other = (f"{shares.ONE_BY_ONE[0]}::test_{i}" for i in range(2))
    assert shares.share_of(one) != shares.share_of(other)
    assert shares.share_of("tests/node/test_ranks.py::test_0") == "tests/node/test_ranks.py"


def test_what_takes_longest_begins_first() -> None:
    paths = [str(path.relative_to(ROOT)) for path in TESTS.rglob("test_*.py")]
    assert set(shares.LONGEST) <= {shares.share_of(path) for path in paths}
    assert shares.rank_of("tests/e2e/test_parity.py") < shares.rank_of("tests/baton/test_wire.py")


def test_workers_share_the_first_reading_of_all_tests() -> None:
    ignored = TESTS / "clients"
    parts = [shares.part_of([TESTS], [ignored], worker, 3) for worker in range(3)]
    files = sorted(path for path in TESTS.rglob("test_*.py") if not path.is_relative_to(ignored))
    assert [file for part in parts for file in part] == files
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_every_folder_has_a_budget() -> None:
    folders = {path.name for path in TESTS.iterdir() if any(path.glob("test_*.py"))}
    assert set(summary.budgets()) == folders - {"clients"}  # of `make test-clients`


def test_the_summary_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def report(path: str, when: str, seconds: float, **properties: int) -> pytest.TestReport:
        where = (path, 0, "test")
        report = pytest.TestReport(f"{path}::test", where, {}, "passed", None, when, duration=seconds)  # type: ignore[arg-type]
        report.user_properties = list(properties.items())
        return report

    monkeypatch.setattr(summary, "budgets", lambda: {"e2e": 2, "baton": 1})
    counts = {summary.COMPARED: 5, summary.NEAR_TIES: 1, summary.EXPERT_TIES: 2}
    reports = [
        report("tests/e2e/test_a.py", "call", 3.0, **counts),
        report("tests/e2e/test_a.py", "teardown", 0.5, **counts),
        report("tests/baton/test_b.py", "call", 0.2),
    ]
    over, within = summary.seconds_by_folder(reports)
    assert over.split() == ["tests/e2e", "3.5", "s", "of", "2", "s", "OVER", "ITS", "BUDGET"]
    assert within.split() == ["tests/baton", "0.2", "s", "of", "1", "s"]
    assert list(summary.parity(reports)) == ["parity: 5 answers compared with references, 1 near ties, 2 of experts"]
