"""The console's pictures, `docs/console/*.png`: `python -m tools.screenshots`. Takes two minutes.

The fleet is of simulated nodes under the load of `baton bench`, with a node that cannot be reached; the chat is with
baton-tiny.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from tools.browser import Browser, find_chromium

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "console"
MAX_BYTES = 150_000
WATCHED_S = 75
"""How long the page is open before its picture is taken: so much of its plots is full."""
HEIGHT = 1080
"""Of the large pictures, in pixels: what a screen shows at once, and a little more."""
KEY = "operator"
FLEET = (
    "--engine=simulated",
    "--profile=h200-8b",
    "--time-scale=0.5",
    "--num-gpu-blocks-override=800",
    "--max-model-len=4096",
)
LOAD = ("--input-len=700", "--output-len=200", "--request-rate=4", "--num-prompts=2000", "--seeds=1")
_HEAD_BYTES = 8
"""Of a PNG; then come its chunks."""


def main() -> None:
    program = find_chromium()
    if program is None:
        sys.exit("there is no Chromium here: install Debian's package chromium")
    FOLDER.mkdir(exist_ok=True)
    with Browser(program) as browser:
        _fleet(browser)
        _chat(browser)
        assert not browser.problems, browser.problems
    for path in sorted(FOLDER.glob("*.png")):
        _squeeze(path)
        print(f"{path.relative_to(ROOT)} {path.stat().st_size:,} bytes")
        if path.stat().st_size > MAX_BYTES:
            sys.exit(f"{path} has more than {MAX_BYTES:,} bytes")


def _fleet(browser: Browser) -> None:
    with _up("--prefill=3", "--decode=3", f"--admin-api-key={KEY}", *FLEET) as url:
        bench = ["deploy.command", "bench", f"--url={url}", *LOAD, "--no-progress"]
        with _process(bench, subprocess.DEVNULL):
            browser.open(f"{url}/", width=1120)
            _add_unreachable(url)
            browser.wait_for("document.querySelector('.card.down')")
            browser.wait_for(f"performance.now() > {1e3 * WATCHED_S}", 2 * WATCHED_S)
            browser.screenshot(FOLDER / "light.png", HEIGHT)
            browser.scheme("dark")
            browser.evaluate("document.querySelector('#fleet-text').open = true")
            browser.wait_for("document.querySelectorAll('#fleet-rows tr').length === 7")
            browser.screenshot(FOLDER / "dark.png", HEIGHT)
            browser.evaluate("document.querySelector('#fleet-text').open = false")
            browser.scheme("light")
            browser.wait_for("document.querySelector('#request-rows tr:not(.live) .stage-prefill')")
            browser.evaluate("document.querySelector('#request-rows tr:not(.live):has(.stage-prefill)').click()")
            browser.wait_for("document.querySelector('#details .facts')")
            browser.screenshot(FOLDER / "details.png", 890)
        browser.open("about:blank")


def _add_unreachable(url: str) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    node = {"role": "decode", "address": "127.0.0.1:9"}
    httpx.post(f"{url}/admin/nodes", json=node, headers=headers, trust_env=False).raise_for_status()


def _chat(browser: Browser) -> None:
    with _up("--device=cpu") as url:
        browser.open(f"{url}/", width=390, height=844)
        browser.wait_for("document.querySelectorAll('.card.up').length === 2")
        for number, text in enumerate(("Hello!", "What is 12 + 30?"), 1):
            browser.evaluate("document.getElementById('chat-text').focus()")
            browser.type(text)
            browser.press("Enter")
            browser.wait_for(f"document.querySelectorAll('.said .bar').length === {number}")
        browser.wait_for("document.querySelectorAll('#request-rows tr').length === 2")
        browser.wait_for("performance.now() > 15000")
        browser.screenshot(FOLDER / "narrow.png")
        browser.open("about:blank")


@contextmanager
def _up(*flags: str) -> Iterator[str]:
    """A cluster; yields the URL of its HTTP API."""
    own = ["deploy.up", "--model=baton-tiny", "--http=127.0.0.1:0", "--grpc=127.0.0.1:0", "--log-level=warning"]
    with _process([*own, *flags], subprocess.PIPE) as process:
        assert process.stdout
        ready, url, *_ = process.stdout.readline().split()
        assert ready == "ready"
        yield url


@contextmanager
def _process(module: Sequence[str], stdout: int) -> Iterator[subprocess.Popen[str]]:
    roots = (ROOT, ROOT / "proto", ROOT / "kernels")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, roots))}
    process = subprocess.Popen([sys.executable, "-m", *module], stdout=stdout, env=env, cwd=ROOT, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)
        if process.stdout:
            process.stdout.close()


def _squeeze(path: Path) -> None:
    """Compress the picture's data as well as zlib can, which browsers have no time for."""
    png = path.read_bytes()
    pieces, data, at = [png[:_HEAD_BYTES]], b"", _HEAD_BYTES
    while at < len(png):
        length = int.from_bytes(png[at : at + 4], "big")
        kind, body = png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        at += length + 12
        if kind == b"IDAT":
            data += body
            continue
        if kind == b"IEND":
            pieces.append(_chunk(b"IDAT", zlib.compress(zlib.decompress(data), 9)))
        pieces.append(_chunk(kind, body))
    path.write_bytes(b"".join(pieces))


def _chunk(kind: bytes, body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")


if __name__ == "__main__":
    main()
