"""A cluster for clients that know nothing of baton: `baton-up` with the embedded model, which can call tools."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv/bin/python"  # baton's environment, not that of the clients
FLAGS = (
    "--http=127.0.0.1:0",
    "--grpc=127.0.0.1:0",
    "--device=cpu",
    "--enable-auto-tool-choice",
    "--tool-call-parser=hermes",
    "--reasoning-parser=qwen3",
)
STOP_S = 60.0

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no host but the router is asked for anything
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["ANONYMIZED_TELEMETRY"] = "False"


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """Base URL of a router with a prefill node and a decode node."""
    command = [str(PYTHON), "-m", "deploy.up", *FLAGS]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout
        try:
            log = []
            for line in process.stdout:
                log.append(line)
                if ready := re.match(r"ready (http://\S+)", line):
                    break
            else:
                raise AssertionError("".join(log))
            reader = threading.Thread(target=process.stdout.read)  # or its pipe would fill
            reader.start()
            yield ready[1]
        finally:
            process.terminate()
            process.wait(STOP_S)
            reader.join(STOP_S)


@pytest.fixture(scope="session")
def api(url: str) -> str:
    """What OpenAI's clients call the base URL."""
    return f"{url}/v1"
