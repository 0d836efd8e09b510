"""`baton bench` on `transformers serve` and on baton, with baton-tiny on this machine's CPU:
`python -m benchmarks.serving.bench_transformers --transformers PATH`.

Shows that the load generator measures a server that is not ours, and what users of either see under the same load. The
servers' greedy answers must be equal. `transformers serve` needs the packages `transformers[serving]` and
`accelerate`, which no node of baton needs.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import httpx
from pydantic import Field

from baton.address import HostPort
from baton.settings import Settings, parse
from benchmarks.harness.tables import Table
from benchmarks.serving.bench_agreement import call, wait_ready
from deploy.ports import HeldPort
from engine.checkpoint import EMBEDDED

MODEL = str(EMBEDDED["baton-tiny"])
QUESTIONS = ("Hello!", "What is 12 + 30?")
FIGURES = ("ttft_ms", "tpot_ms", "e2e_ms")
READY_S = 120.0


class TransformersSettings(Settings):
    """Measures `transformers serve` and baton with `baton bench`."""

    prog: ClassVar[str] = "benchmarks.serving.bench_transformers"

    transformers: Path = Field(description="the command `transformers`, of an environment that can serve")
    num_prompts: int = Field(30, ge=2, description="requests of each run")
    request_rates: tuple[float, ...] = Field((0.5, 2.0), description="of all requests, a run for each")
    input_len: int = Field(64, ge=1, description="words of a prompt")
    output_len: int = Field(32, ge=1, description="tokens of an answer at most")


def main() -> None:
    settings = parse(TransformersSettings)
    theirs = [str(settings.transformers), "serve", MODEL, "--device=cpu", "--dtype=float32"]
    servers = {
        "baton": [sys.executable, "-m", "deploy.up", f"--model={MODEL}", "--device=cpu", "--grpc=127.0.0.1:0"],
        "transformers serve": theirs,
        "with --continuous-batching": [*theirs, "--continuous-batching"],
    }
    answers, found = {}, {}
    for name, command in servers.items():
        with serving(command, is_ours=name == "baton") as url:
            answers[name] = [ask(url, question) for question in QUESTIONS]
            found[name] = {rate: measured(settings, url, rate) for rate in settings.request_rates}
        print(name, answers[name], file=sys.stderr, flush=True)
    if len({tuple(given) for given in answers.values()}) != 1:
        sys.exit(f"bench_transformers: greedy answers differ: {answers}")
    print(table(found).markdown())
    print(json.dumps({"benchmark": "bench_transformers", "runs": found}))


@contextlib.contextmanager
def serving(command: Sequence[str], is_ours: bool) -> Iterator[str]:
    """The server's URL, once it is ready."""
    port = HeldPort(HostPort("127.0.0.1", 0))
    host, number = port.address.host, port.address.port
    listen = [f"--http={port.address}"] if is_ours else [f"--host={host}", f"--port={number}"]
    url = f"http://{host}:{number}"
    port.close()
    with subprocess.Popen([*command, *listen], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_ready(f"{url}/{'ready' if is_ours else 'health'}", READY_S)
            yield url
        finally:
            process.terminate()


def ask(url: str, question: str) -> str:
    body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": question}]}
    body |= {"temperature": 0, "max_tokens": 32}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120, trust_env=False)
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["message"]["content"])


def measured(settings: TransformersSettings, url: str, rate: float) -> dict[str, Any]:
    """What `baton bench` found."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        flags = [f"--url={url}", f"--model={MODEL}", "--endpoint=chat", "--seeds=1", "--arrival=fixed", "--no-progress"]
        flags += [f"--num-prompts={settings.num_prompts}", f"--request-rate={rate}", f"--result-file={result}"]
        flags += [f"--input-len={settings.input_len}", f"--output-len={settings.output_len}"]
        call([sys.executable, "-m", "deploy.command", "bench", *flags], Path.cwd())
        (run,) = json.loads(result.read_text())["runs"].values()
    return {key: run[key] for key in ("requests_per_s", "output_tokens_per_s", "failed", *FIGURES)}


def table(found: Mapping[str, Mapping[float, Mapping[str, Any]]]) -> Table:
    """A row for each server and rate; p50 and p99 in milliseconds."""
    columns = ["server", "sent/s", "answered/s", "tokens/s", *(f"{name[:-3].upper()} p50, p99" for name in FIGURES)]
    rows = [
        [
            name,
            f"{rate:g}",
            f"{run['requests_per_s']:.2f}",
            f"{run['output_tokens_per_s']:.1f}",
            *(f"{run[figure]['p50']:.0f}, {run[figure]['p99']:.0f}" for figure in FIGURES),
        ]
        for name, runs in found.items()
        for rate, run in runs.items()
    ]
    return Table(columns, rows)


if __name__ == "__main__":
    main()
