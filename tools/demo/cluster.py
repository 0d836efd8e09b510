"""A cluster run by baton-up for the duration of the demo, and metrics of its nodes."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
NUM_LAST_LINES = 20
READY_LINE = re.compile(r"ready (http://\S+) grpc (\S+)")
METRICS_LINE = re.compile(r"^(\S+) +\| .* ready .*metrics=(http://\S+)", re.MULTILINE)


class DemoFailed(Exception):
    """A check of the demo failed. The message says which."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """A node's KV blocks, counted by state."""

    by_state: dict[str, int]

    @property
    def in_use(self) -> int:
        return self.total - self.by_state["free"] - self.by_state["cached"]

    @property
    def total(self) -> int:
        return sum(self.by_state.values())


@dataclass(frozen=True, slots=True)
class Cluster:
    """The cluster's addresses. `metrics`: URL of each node's metrics page."""

    http: str
    grpc: str
    metrics: dict[str, str]

    async def blocks(self, node: str) -> Blocks:
        async with httpx.AsyncClient(trust_env=False) as client:
            page = (await client.get(self.metrics[node])).raise_for_status().text
        samples = [s for family in text_string_to_metric_families(page) for s in family.samples]
        return Blocks({s.labels["state"]: int(s.value) for s in samples if s.name == "baton:kv_blocks"})


@asynccontextmanager
async def running_cluster() -> AsyncIterator[Cluster]:
    """Run `baton-up` on free ports. Raises DemoFailed if it does not get ready; prints its last lines on errors."""
    with tempfile.NamedTemporaryFile(prefix="baton-demo-", suffix=".log") as log:
        process = await _start(log.fileno())
        try:
            yield await _ready(process, Path(log.name))
        except Exception:
            print(_last_lines(Path(log.name)), file=sys.stderr)
            raise
        finally:
            await _stop(process)


async def _start(log: int) -> asyncio.subprocess.Process:
    up = ["deploy.up", "--model=baton-tiny", "--http=127.0.0.1:0", "--grpc=127.0.0.1:0", "--device=cpu"]
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "deploy.child", str(os.getpid()), *up),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=log,
        process_group=0,  # Ctrl-C stops the demo, which stops the cluster
    )


async def _ready(process: asyncio.subprocess.Process, log: Path) -> Cluster:
    assert process.stdout
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            line = (await process.stdout.readline()).decode()
    except TimeoutError:
        raise DemoFailed(f"the cluster is not ready after {START_TIMEOUT_S:g} s") from None
    ready = READY_LINE.match(line)
    if not ready:
        raise DemoFailed("the cluster did not start")
    return Cluster(ready[1], ready[2], _metrics_pages(log))


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()  # its children go with it
        await process.wait()


def _metrics_pages(log: Path) -> dict[str, str]:
    """By node, from the log line that each writes when it is ready."""
    return dict(METRICS_LINE.findall(log.read_text(errors="replace")))


def _last_lines(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-NUM_LAST_LINES:])
