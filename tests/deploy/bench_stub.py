"""What `baton bench` is tested against: a server with known delays."""

from __future__ import annotations

import asyncio
import json
import ssl

from baton.settings import parse
from deploy.bench.main import Bench
from deploy.bench.plan import Planner
from deploy.bench.settings import BenchSettings
from tests.certificates import Certificate

FIRST_S, GAP_S, TOKENS = 0.06, 0.03, 5
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(content), content)


def event(value: object) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


class Stub:
    """A server with OpenAI's API that answers after known delays. `refuse`: every so many requests get a 429. `tls`:
    it serves https."""

    def __init__(self, refuse: int = 0, cut: bool = False, tls: Certificate | None = None) -> None:
        self.bodies: list[dict] = []
        self.connections = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._refuse, self._cut = refuse, cut
        self._scheme, self._tls = "http", None
        if tls is not None:
            self._scheme, self._tls = "https", ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            self._tls.load_cert_chain(tls.certfile, tls.keyfile)

    async def __aenter__(self) -> Stub:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.url = f"{self._scheme}://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await asyncio.sleep(0)  # for those that were accepted just now
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                content = await reader.readexactly(length)
                await self._answer(head.split(b" ")[1].decode(), content, writer)
        except (asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, content: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            listed = b'{"data": [{"id": "stub"}]}'
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(listed), listed))
            return
        self.bodies.append(json.loads(content))
        if self._refuse and len(self.bodies) % self._refuse == 0:
            writer.write(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 4\r\n\r\nbusy")
            return
        writer.write(HEAD)
        chat = path == "/v1/chat/completions"
        for number in range(TOKENS):
            await asyncio.sleep(GAP_S if number else FIRST_S)
            choice = {"delta": {"content": "x"}} if chat else {"text": "x"}
            whole = event({"choices": [choice]})
            writer.write(chunk(whole[:9]) + chunk(whole[9:]))  # events are cut anywhere
            if self._cut and number == 2:
                writer.close()
                return
        usage = {"prompt_tokens": 7, "completion_tokens": TOKENS, "prompt_tokens_details": {"cached_tokens": 3}}
        writer.write(chunk(event({"choices": [], "usage": usage}) + event(b"[DONE]")) + b"0\r\n\r\n")


def settings_of(url: str, *flags: str) -> BenchSettings:
    return parse(BenchSettings, [f"--url={url}", "--no-progress", "--input-len=8", *flags])


async def results_of(stub: Stub, *flags: str):
    settings = settings_of(stub.url, *flags)
    return await Bench(settings, Planner(settings)).run()
