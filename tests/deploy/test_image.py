"""The router's image, made in a virtual environment: its size, and its entry point with nothing else installed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tools import image_size

DOCKERFILE = image_size.ROOT / "deploy" / "docker" / "router.Dockerfile"


def test_the_sum_counts_files_once_and_no_links(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "a").write_bytes(bytes(2_000_000))
    (tmp_path / "lib64").symlink_to(tmp_path / "lib")
    (tmp_path / "python").symlink_to(sys.executable)
    text, total = image_size.table(tmp_path)
    assert total - image_size.BASE_BYTES == 2_000_000
    assert re.search(r"^/opt/baton +2\.0 MB$", text, re.MULTILINE)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_routers_image_is_small_and_its_entry_point_serves_without_torch(tmp_path: Path) -> None:
    """Needs a package index."""
    python = image_size.install(tmp_path / "venv")
    assert image_size.table(tmp_path / "venv")[1] < image_size.LIMIT_BYTES
    found = re.search(r"^ENTRYPOINT (.*)$", DOCKERFILE.read_text(), re.MULTILINE)
    assert found
    program, *words = json.loads(found[1])
    command = [str(python.parent / program), *words, "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
    environment = {"PATH": os.environ["PATH"], "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [
            *command,
            "--decode-dns",
            "no-such-name.invalid:9000",
            "--otlp-traces-endpoint",
            "http://127.0.0.1:9/v1/traces",
        ],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    ) as router:
        assert router.stderr
        for line in router.stderr:  # until it serves; it ends if it cannot
            if at := re.search(r"http=(?:http://)?([\d.]+:\d+)", line):
                break
        else:
            pytest.fail(f"the router exited with {router.wait()}")
        url = f"http://{at[1]}/health"
        assert urllib.request.urlopen(url, timeout=30).status == 200
        router.send_signal(signal.SIGTERM)
        assert router.wait(timeout=60) == 0
