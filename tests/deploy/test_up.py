"""`baton-up` for real: a cluster answers, loses a node, gets it back; and nothing is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.deploy.spawned import ROOT, Up, python_path, wait_for_end

ANY_PORTS = ("--http=127.0.0.1:0", "--grpc=127.0.0.1:0", "--device=cpu")


def answer(url: str) -> str:
    body = {"model": "baton-tiny", "messages": [{"role": "user", "content": "What is 28 + 98?"}], "temperature": 0}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
    return str(response.raise_for_status().json()["choices"][0]["message"]["content"])


@pytest.mark.timeout(300)
def test_cluster_answers_heals_and_leaves_nothing_behind() -> None:
    with Up(*ANY_PORTS, "--decode=2", "--prefill-tensor-parallel-size=2") as up:
        up.wait_for(r"^baton-up +\| prefill-0 2 ranks, decode-0 1 rank, decode-1 1 rank; 4 ranks on \d+ cores, threads")
        url = up.wait_ready()
        for node in ("prefill-0", "decode-0", "decode-1"):
            up.wait_for(rf"^router .* node_id={node} .* up$")
        assert answer(url) == "28 + 98 = 126"
        first = up.children()
        assert sorted(first) == ["decode-0", "decode-1", "prefill-0", "router"]

        os.kill(first["decode-0"], signal.SIGKILL)
        up.wait_for(r"^baton-up +\| decode-0 was killed by SIGKILL; it starts again in 0.5 s$")
        up.wait_for(r"(?s)decode-0 was killed.*^decode-0 [^\n]* ready address")
        up.wait_for(r"(?s)decode-0 was killed.*^router [^\n]* node_id=decode-0 [^\n]* up$")
        assert answer(url) == "28 + 98 = 126"
        second = up.children()
        assert second["decode-0"] != first["decode-0"]
        assert {**first, "decode-0": second["decode-0"]} == second

        up.send(signal.SIGKILL)
        for pid in second.values():
            wait_for_end(pid)


@pytest.mark.parametrize("flag", ["http", "grpc"])
def test_busy_port_is_named_before_anything_starts(flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = "{}:{}".format(*server.getsockname())
        with Up(*ANY_PORTS, f"--{flag}={address}") as up:
            assert up.wait_end() == 1
            assert up.log == f"baton-up: --{flag}: {address} cannot be had: Address already in use\n"


@pytest.mark.parametrize(
    ("planted", "says"),
    [
        ("raise_open_files = lambda: 16", "open files: a limit of 16 is too low, 128 are needed at least (ulimit -n)"),
        ("NODE_HOST = '192.0.2.1'", "192.0.2.1:0 cannot be had: Cannot assign requested address"),
    ],
)
def test_a_machine_that_lacks_what_nodes_need(planted: str, says: str) -> None:
    """A loopback address, for one."""
    program = f"from deploy import up; up.{planted}; up.main({ANY_PORTS!r})"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=python_path(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, f"baton-up: {says}\n")


def test_more_ranks_than_cores_are_refused_before_anything_starts() -> None:
    with Up(*ANY_PORTS, "--decode-tensor-parallel-size=64") as up:
        assert up.wait_end() == 1
        assert "baton-up: --decode-tensor-parallel-size: decode-0 would have 64 ranks on" in up.log


def test_bad_flag_is_named_before_anything_starts() -> None:
    with Up("--decode=0") as up:
        assert up.wait_end() == 2
        assert up.log == "baton-up: --decode: Input should be greater than or equal to 1, not '0'\n"


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--model={folder}", "--model .*: the folder has no config.json"),
        pytest.param(
            "--max-model-len=1000000", "--max-model-len: 1000000", marks=pytest.mark.full
        ),  # found after torch was imported
    ],
)
def test_what_no_node_can_start_with_ends_it_all(flag: str, says: str, tmp_path: Path) -> None:
    with Up(*ANY_PORTS, flag.format(folder=tmp_path)) as up:
        assert up.wait_end(150) == 1
        up.wait_for(rf"^(prefill|decode)-0 +\| .*{says}")
        up.wait_for(r"^baton-up +\| (prefill|decode)-0 cannot start \(exit code 1\)$")
