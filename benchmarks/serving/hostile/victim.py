"""Another client's stream while a cluster is attacked: `python -m benchmarks.serving.hostile.victim HOST:PORT`, run by
`benchmarks.serving.hostile` in a separate process, so that the attacker's work does not distort its times.

Streams one answer after another and writes a line for each event: the time (`time.monotonic`, the same in all processes
of a machine), the event, and for a lost stream the reason.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import dataclass, field

from baton.address import HostPort

BEGIN, TOKEN, END, LOST = "begin", "token", "end", "lost"
RETRY_S = 0.05
SILENT_S = 120.0
"""A stream that is silent for this long is given up."""
NUM_TOKENS = 3500
LIMIT_BYTES = 1024 * 1024
FLOWING_TOKENS = 5


async def _stream(address: HostPort) -> str:
    """Stream one answer; returns why it was lost, or an empty string."""
    body = {"prompt": "Once upon a time", "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
    content = json.dumps({**body, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {address}\r\ncontent-length: {len(content)}\r\n\r\n"
    reader, writer = await asyncio.open_connection(address.host, address.port, limit=LIMIT_BYTES)
    try:
        writer.write(head.encode() + content)
        async with asyncio.timeout(SILENT_S):
            status = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1].decode()
        if status != "200":
            return status
        while True:
            async with asyncio.timeout(SILENT_S):
                line = await reader.readuntil(b"\n")
            if line.startswith(b"data: [DONE]"):
                return ""
            if b'"error"' in line:
                return line.decode(errors="replace").strip()[:200]
            if line.startswith(b"data: {"):
                _say(TOKEN)
    finally:
        writer.close()


async def _forever(address: HostPort) -> None:
    while True:
        _say(BEGIN)
        try:
            why = await _stream(address)
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            why = repr(error)
        _say(f"{LOST} {why}" if why else END)
        if why:
            await asyncio.sleep(RETRY_S)


def _say(what: str) -> None:
    sys.stdout.write(f"{time.monotonic():.6f} {what}\n")
    sys.stdout.flush()


@dataclass(slots=True)
class Seen:
    """The victim's experience between two times. `longest_gap_s` includes the wait for a first token and, after a lost
    stream, the time until the next one's first token."""

    longest_gap_s: float = 0.0
    num_tokens: int = 0
    lost: list[str] = field(default_factory=list)


class Victim:
    """Starts and observes the victim's process. Use with `async with`."""

    def __init__(self, address: HostPort) -> None:
        self._address = address
        self._events: list[tuple[float, str]] = []

    async def __aenter__(self) -> Victim:
        command = [sys.executable, "-m", "deploy.child", str(os.getpid()), "benchmarks.serving.hostile.victim"]
        self._process = await asyncio.create_subprocess_exec(
            *command, str(self._address), stdout=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL
        )
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        await self._reading

    async def _read(self) -> None:
        assert self._process.stdout
        async for line in self._process.stdout:
            at, what = line.decode(errors="replace").strip().split(" ", 1)
            self._events.append((float(at), what))

    async def flows(self, timeout_s: float) -> bool:
        """Whether at least FLOWING_TOKENS more tokens arrive within that time."""
        since = time.monotonic()
        while time.monotonic() - since < timeout_s:
            if self.between(since, time.monotonic()).num_tokens >= FLOWING_TOKENS:
                return True
            await asyncio.sleep(RETRY_S)
        return False

    def between(self, since: float, until: float) -> Seen:
        seen = Seen()
        waiting_since: float | None = None
        for at, what in [*self._events, (until, "")]:
            if waiting_since is not None and at >= since and waiting_since < until:
                gap = min(at, until) - waiting_since
                seen.longest_gap_s = max(seen.longest_gap_s, gap if what in (TOKEN, "") else 0.0)
            if what == TOKEN:
                seen.num_tokens += since <= at <= until
                waiting_since = at
            elif what == END:
                waiting_since = None
            elif waiting_since is None:
                waiting_since = at
            if what.startswith(LOST) and since <= at <= until:
                seen.lost.append(what.removeprefix(LOST).strip())
        return seen


if __name__ == "__main__":
    asyncio.run(_forever(HostPort.parse(sys.argv[1])))
