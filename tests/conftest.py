"""What concerns all tests: Triton's interpreter, hypothesis, shares for parallel workers, and what each folder took."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from tests import fork_server, interpreter, machines, shares, summary

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling
    from xdist.workermanage import WorkerController

ROOT = Path(__file__).resolve().parent.parent
FORK_SERVER = "fork_server"
_shared = pytest.StashKey[fork_server.SharedForkServer]()


def _is_controller(config: pytest.Config) -> bool:
    """Of parallel workers, which run the tests."""
    return bool(config.getoption("numprocesses", None)) and not hasattr(config, "workerinput")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Without a GPU, Triton kernels run in Triton's interpreter, which must be chosen before triton is imported. And
    parallel workers share the cores: torch gets one in each."""
    if _is_controller(config):
        return  # importing torch takes seconds
    gc.disable()  # until all is imported
    # each client of httpx and openai would else read all of the world's authorities, for 40 ms
    os.environ.pop("SSL_CERT_FILE", None)
    os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)
    if hasattr(config, "workerinput"):
        os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported
        fork_server.shared_address = bytes.fromhex(config.workerinput[FORK_SERVER])
    if "not full" in config.option.markexpr:
        settings.load_profile(machines.SAMPLE)  # --hypothesis-profile comes after it
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
        interpreter.hasten()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    """All workers have one fork server."""
    if _shared not in node.config.stash:
        node.config.stash[_shared] = server = fork_server.SharedForkServer()
        node.config.add_cleanup(server.close)
    node.workerinput[FORK_SERVER] = node.config.stash[_shared].address.hex()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    from xdist.scheduler import LoadScopeScheduling

    class ByShare(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return shares.share_of(nodeid)

    config.option.loadscopereorder = False  # shares begin in the order of their first tests
    return ByShare(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Parallel workers begin with what takes longest, so that none is left alone with it."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: shares.rank_of(item.nodeid))


def pytest_collection(session: pytest.Session) -> None:
    """Where no bytecode is there yet, each parallel worker writes a part of it, and then reads what the others have
    written. What cannot be imported fails once more as it is collected."""
    if not hasattr(session.config, "workerinput"):
        return
    worker, count = (session.config.workerinput[name] for name in ("workerid", "workercount"))
    folders = [Path(arg).resolve() for arg in session.config.args if Path(arg).is_dir()]
    ignored = [Path(path).resolve() for path in session.config.getoption("ignore")]
    capture = session.config.pluginmanager.getplugin("capturemanager")
    capture.resume_global_capture()  # as pytest does while it collects
    for file in shares.part_of(folders, ignored, int(worker.removeprefix("gw")), count):
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    capture.suspend_global_capture()
    capture.read_global_capture()


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported stays, and its garbage: no collection need go through all of it, for most of a second. So it is
    with the routers that tests have stopped, which caches of FastAPI keep."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for said in terminalreporter.stats.values() for report in said]
    tests = [report for report in reports if isinstance(report, pytest.TestReport)]
    for line in [*summary.seconds_by_folder(tests), *summary.parity(tests), *summary.parameters(tests)]:
        terminalreporter.write_line(line)
