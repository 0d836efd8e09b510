"""The command `baton-router`: settings, ports, signals; and what it may import."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from baton.address import HostPort
from baton.settings import parse
from router.settings import RouterSettings
from tests import hangups

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
NODES = ("--prefill", "127.0.0.1:1", "--decode", "127.0.0.1:2")


def run(*flags: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "router.main", *flags]
    return subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=60, check=False)


def test_it_imports_without_torch_or_any_of_the_nodes_packages():
    blocked = ("torch", "transformers", "triton", "ucxx", "numpy", "safetensors", "engine", "kv_transfer")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); import router.main, baton.wire, baton.telemetry"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], env=ENV, check=True, timeout=60)


def test_settings():
    flags = ("--prefill", "a:1,b:2", "--decode", "c:3", "--http", "0.0.0.0:80", "--request-timeout", "5")
    settings = parse(RouterSettings, flags)
    assert settings.prefill == (HostPort("a", 1), HostPort("b", 2))
    assert (settings.decode, settings.http, settings.request_timeout) == (
        (HostPort("c", 3),),
        HostPort("0.0.0.0", 80),
        5.0,
    )


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--prefill", "a:1"), "--decode: at least one address is needed"),
        (("--prefill", "a:1,a:1", "--decode", "b:1"), "a:1 is given twice"),
        ((*NODES, "--request-timeout", "0"), "--request-timeout"),
        ((*NODES, "--request-timeout", "inf"), "--request-timeout"),
        ((*NODES, "--drain-timeout", "inf"), "--drain-timeout"),
        ((*NODES, "--first-token", "router"), "--first-token"),
        ((*NODES, "--enable-auto-tool-choice"), "--enable-auto-tool-choice: needs --tool-call-parser"),
    ],
)
def test_bad_settings_are_named(flags, says, capsys):
    with pytest.raises(SystemExit):
        parse(RouterSettings, flags)
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--http", "--grpc"])
def test_a_busy_port_is_named(flag):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        other = "--grpc" if flag == "--http" else "--http"
        result = run(*NODES, flag, address, other, "127.0.0.1:0")
    assert result.returncode == 1
    assert result.stderr == f"baton-router: {flag}: {address} cannot be had: Address already in use\n"


def test_it_serves_until_a_signal_and_nodes_that_start_later_are_nothing_to_warn_of():
    command = [sys.executable, "-m", "router.main", *NODES, "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
    with hangups.heard():
        process = subprocess.Popen(command, env=ENV, stderr=subprocess.PIPE, text=True)
    with process:
        try:
            line = next(line for line in process.stderr if "listening" in line)
            address = line.split("http=")[1].split()[0]
            assert httpx.get(f"http://{address}/health", timeout=20).status_code == 200
            response = httpx.get(f"http://{address}/ready", timeout=20)
            assert response.status_code == 503
            assert "no prefill node and no decode node" in response.json()["error"]["message"]
            process.send_signal(signal.SIGHUP)
            rest = process.stderr.read()
            assert process.wait(timeout=20) == 0
            assert "not ready: no prefill node" in line + rest
            assert "level=warning" not in line + rest
        finally:
            process.kill()
