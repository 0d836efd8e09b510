"""A headless Chromium, driven over its DevTools protocol: for the tests of the console, and its pictures in docs."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
START_S = 60.0
ANSWER_S = 200.0
_HELLO = "DevTools listening on "
_KEYS = {"Enter": ("\r", 13), "Tab": ("", 9), "Escape": ("", 27)}
_WAIT = """
new Promise((resolve, reject) => {
  const end = performance.now() + %d;
  (function look() {
    const found = (%s);
    if (found) resolve(found);
    else if (performance.now() > end) reject(new Error("not in time"));
    else setTimeout(look, 20);
  })();
})
"""


def find_chromium() -> str | None:
    """The program's path; None: there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class PageError(Exception):
    """The page threw, or did not become what was waited for."""


class Browser:
    """One tab. As a context manager it ends the browser and its profile. `problems`: errors that the page logged."""

    def __init__(self, program: str) -> None:
        self.problems: list[str] = []
        self._next = 0
        self._profile = tempfile.TemporaryDirectory(prefix="baton-chromium-", ignore_cleanup_errors=True)
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"]
        quiet = ["--no-first-run", "--disable-extensions", "--disable-background-networking", "--disable-sync"]
        own = [f"--user-data-dir={self._profile.name}", "--remote-debugging-port=0", "about:blank"]
        self._process = subprocess.Popen(
            [program, *flags, *quiet, *own], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        self._socket = connect(self._tab(), max_size=None, open_timeout=START_S, ping_interval=None)
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stderr:
            self._process.stderr.close()
        self._profile.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A method of the protocol; events that come meanwhile are looked at for problems."""
        self._next += 1
        self._socket.send(json.dumps({"id": self._next, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=ANSWER_S))
            if message.get("id") != self._next:
                self._note(message)
            elif "error" in message:
                raise PageError(f"{method}: {message['error']['message']}")
            else:
                result: dict[str, Any] = message["result"]
                return result

    def open(self, url: str, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """`scheme`: light or dark."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.scheme(scheme)
        self.call("Page.navigate", url=url)
        self.wait_for(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def scheme(self, name: str) -> None:
        """As if the user had chosen it for all pages: light or dark."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript, awaited if it is a promise. Raises PageError."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            thrown = answer["exceptionDetails"]
            raise PageError(f"{expression.strip()}: {thrown.get('exception', {}).get('description', thrown['text'])}")
        return answer["result"].get("value")

    def wait_for(self, expression: str, timeout_s: float = 30.0) -> Any:
        """Until the expression is true; its value. Raises PageError."""
        return self.evaluate(_WAIT % (timeout_s * 1e3, expression))

    def press(self, key: str) -> None:
        """A key of _KEYS, as from a keyboard."""
        text, code = _KEYS[key]
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, text=text, windowsVirtualKeyCode=code)

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.call("Input.insertText", text=text)

    def screenshot(self, path: Path, height: int | None = None) -> None:
        """The page from its top, all of it or `height` pixels, as a PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _tab(self) -> str:
        assert self._process.stderr
        told: list[str] = []
        for line in self._process.stderr:
            told.append(line)
            if line.startswith(_HELLO):
                host = line.removeprefix(_HELLO).split("/")[2]
                with urlopen(f"http://{host}/json/list", timeout=START_S) as answer:
                    tabs: Sequence[dict[str, str]] = json.load(answer)
                return next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
        raise PageError(f"Chromium did not start: {''.join(told)}")

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.problems.append(details.get("exception", {}).get("description", details["text"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.problems.append(str([argument.get("value") for argument in params["args"]]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
