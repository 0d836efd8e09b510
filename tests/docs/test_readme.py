"""The README's commands and examples, run as they stand; only the ports are others.

A comment before a block says how it is run: `up` (one command, the cluster that the clients ask), `client` (a program
that must succeed, and say what the `text` block after it shows), `program` (likewise, but it asks no cluster), `roles`
(processes, each a line, started together).
"""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.address import HostPort
from deploy.ports import HeldPort, PortTaken
from node.settings import METRICS_PORT_OFFSET
from tests.deploy.spawned import ROOT, Process, python_path

BLOCK = re.compile(r"<!-- run: (\w+) -->\n```(\w+)\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
PORTS = re.compile(r"127\.0\.0\.1:(\d+)")
CLIENT_S = 60.0

pytestmark = pytest.mark.timeout(300)


@dataclass(frozen=True)
class Block:
    kind: str
    language: str
    text: str
    output: str


BLOCKS = [Block(*found.groups(default="")) for found in BLOCK.finditer((ROOT / "README.md").read_text())]
CLIENTS = [block for block in BLOCKS if block.kind == "client"]


def of_kind(kind: str) -> Block:
    (block,) = [block for block in BLOCKS if block.kind == kind]
    return block


def free_ports(text: str) -> dict[str, str]:
    """For each port in `text` a free one, whose metrics port is free too."""
    ports: dict[str, str] = {}
    with ExitStack() as held:
        for port in dict.fromkeys(PORTS.findall(text)):
            while port not in ports:
                address = held.enter_context(HeldPort(HostPort("127.0.0.1", 0))).address
                try:
                    held.enter_context(HeldPort(HostPort(address.host, address.port + METRICS_PORT_OFFSET)))
                except (PortTaken, OverflowError):
                    continue
                ports[port] = str(address.port)
    return ports


def with_ports(text: str, ports: dict[str, str]) -> str:
    return PORTS.sub(lambda found: f"127.0.0.1:{ports[found[1]]}", text)


def command(line: str) -> list[str]:
    """The line with its script replaced by what the script runs: scripts need not be installed where tests run."""
    script, *arguments = shlex.split(line)
    module, function = SCRIPTS[Path(script).name].split(":")
    return ["-c", f"import sys; from {module} import {function}; sys.exit({function}())", *arguments]


@pytest.fixture(scope="module")
def ports() -> Iterator[dict[str, str]]:
    """Of the cluster that `up` starts."""
    line = of_kind("up").text
    ports = free_ports(line)
    with Process(*command(with_ports(line, ports)), "--device=cpu") as up:
        up.wait_for(rf"^ready http://127\.0\.0\.1:{ports['8000']} ")
        yield ports
        up.send(signal.SIGINT)
        up.wait_for(r"^baton-up +\| stopping; Ctrl-C again kills$")
        assert up.wait_end() == 0
        assert "killed" not in up.log


@pytest.mark.parametrize("block", CLIENTS, ids=[f"{i}-{block.language}" for i, block in enumerate(CLIENTS)])
def test_example(block: Block, ports: dict[str, str]) -> None:
    succeeds(block, ports)


def test_program() -> None:
    succeeds(of_kind("program"), {})


def succeeds(block: Block, ports: dict[str, str]) -> None:
    program = {"bash": ["bash", "-euc"], "python": [sys.executable, "-Werror", "-c"]}[block.language]
    done = subprocess.run(
        [*program, with_ports(block.text, ports)],
        cwd=ROOT,
        env=python_path(),
        capture_output=True,
        text=True,
        timeout=CLIENT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    wanted = ".*".join(re.escape(piece) for piece in block.output.strip().split("..."))
    assert re.fullmatch(wanted, done.stdout.strip()), done.stdout


def test_there_is_a_curl_an_openai_and_a_grpc_example() -> None:
    texts = [block.text for block in CLIENTS]
    assert [any(word in text for text in texts) for word in ("curl ", "import OpenAI", "import grpc")] == [True] * 3
    assert all(block.output for block in CLIENTS)


def test_commands_of_the_roles_make_a_cluster() -> None:
    text = of_kind("roles").text
    ports = free_ports(text)
    lines = with_ports(text, ports).splitlines()
    with ExitStack() as stack:
        nodes = [stack.enter_context(Process(*command(line))) for line in lines if "router" not in line]
        router = stack.enter_context(Process(*command(next(line for line in lines if "router" in line))))
        router.wait_for(rf" ready[, ].*http://127\.0\.0\.1:{ports['8000']} ")  # degraded, if the decode node was first
        for role in ("prefill", "decode"):
            router.wait_for(rf" role={role} up$")
        for process in (router, *nodes):
            process.send(signal.SIGTERM)
            assert process.wait_end() == 0
