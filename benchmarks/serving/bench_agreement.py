"""Whether `baton bench` measures what other tools measure: `python -m benchmarks.serving.bench_agreement`.

One server, simulated nodes behind a router, whose times do not depend on this machine's speed; the same load from each
tool in turn, several times. Beside each tool's figures stand those of the router for the same requests, since what the
server does differs from run to run. Tools that are not installed in this environment are named by the path of their
command.
"""

from __future__ import annotations

import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from baton.address import HostPort
from baton.settings import Settings, parse
from benchmarks.harness.tables import Table
from deploy.ports import HeldPort
from engine.checkpoint import EMBEDDED

MODEL = "baton-tiny"
INPUT_TOKENS, OUTPUT_TOKENS = 207, 64
OF_ROUTER = {"TTFT mean": "time_to_first_token_seconds", "latency mean": "e2e_request_latency_seconds"}
"""What the router measures, too, and its histogram."""
FIGURES = ("requests/s", "output tokens/s", "TTFT mean", "TTFT p50", "ITL mean", "latency mean")
TIME_SCALE = 0.05
"""Steps take 20 times as long as an H200's with an 8B model, so that a tool's own milliseconds count for little."""
TIMEOUT_S = 300.0
READY_S = 60.0

Measured = dict[str, float]


class AgreementSettings(Settings):
    """Measures one server with baton bench, AIPerf and GuideLLM."""

    prog: ClassVar[str] = "benchmarks.serving.bench_agreement"

    aiperf: Path | None = Field(None, description="the command of AIPerf; unset: it is left out")
    guidellm: Path | None = Field(None, description="the command of GuideLLM; unset: it is left out")
    num_prompts: int = Field(80, ge=10, description="requests of each run")
    request_rate: float = Field(4.0, gt=0, description="of all, sent at equal intervals")
    rounds: int = Field(3, ge=1, description="runs of each tool, in turn")


def main() -> None:
    settings = parse(AgreementSettings)
    tools: dict[str, Callable[[str, Path], Measured]] = {"baton bench": lambda *a: baton_bench(settings, *a)}
    if settings.aiperf:
        tools["AIPerf"] = lambda *a: aiperf(settings, *a)
    if settings.guidellm:
        tools["GuideLLM"] = lambda *a: guidellm(settings, *a)
    found: dict[str, list[Measured]] = {name: [] for name in tools}
    with tempfile.TemporaryDirectory() as folder, cluster() as url:
        for number in range(settings.rounds):
            for name, run in tools.items():
                out = Path(folder) / f"{name.replace(' ', '-')}-{number}"
                out.mkdir()
                before = totals(url)
                measured = run(url, out)
                found[name].append(measured | means(before, totals(url)))
                print(name, found[name][-1], file=sys.stderr, flush=True)
    print(table(found).markdown())
    print(json.dumps({"benchmark": "bench_agreement", "rounds": found}))


def totals(url: str) -> dict[str, tuple[float, float]]:
    """Seconds and observations of each of the router's histograms so far."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=READY_S) as answer:
        page = answer.read().decode()
    found = {}
    for figure, histogram in OF_ROUTER.items():
        values = (re.findall(rf"^baton:{histogram}_{end}{{.*}} (\S+)$", page, re.MULTILINE) for end in ("sum", "count"))
        found[figure] = tuple(sum(map(float, of)) for of in values)
    return found  # type: ignore[return-value]


def means(before: Mapping[str, tuple[float, float]], after: Mapping[str, tuple[float, float]]) -> Measured:
    """Of the requests between the two, a tool's warm-up included, in milliseconds."""
    found = {}
    for figure in OF_ROUTER:
        seconds, count = (b - a for a, b in zip(before[figure], after[figure], strict=True))
        found[f"{figure} of router"] = seconds / count * 1e3
    return found


def table(found: Mapping[str, list[Measured]]) -> Table:
    """Medians over the rounds, and how far the others are from baton bench."""
    medians = {
        name: {figure: statistics.median(run[figure] for run in runs) for figure in FIGURES}
        for name, runs in found.items()
    }
    own = medians["baton bench"]
    rows = []
    for figure in FIGURES:
        cells = [f"{own[figure]:.2f}"]
        for name in list(medians)[1:]:
            value = medians[name][figure]
            cells.append(f"{value:.2f} ({value / own[figure] - 1:+.1%})")
        rows.append([figure, *cells])
    for figure in OF_ROUTER:
        beyond = ([run[figure] / run[f"{figure} of router"] - 1 for run in runs] for runs in found.values())
        rows.append([f"{figure}, beyond the router's own", *(f"{statistics.median(each):+.1%}" for each in beyond)])
    return Table(["ms, if nothing else is said", *medians], rows)


@contextlib.contextmanager
def cluster() -> Iterator[str]:
    """Simulated nodes: its URL."""
    ports = [HeldPort(HostPort("127.0.0.1", 0)) for _ in range(2)]
    http, grpc = (port.address for port in ports)
    flags = ["--prefill=1", "--decode=1", "--engine=simulated", "--profile=h200-8b", f"--time-scale={TIME_SCALE}"]
    command = [sys.executable, "-m", "deploy.up", f"--model={MODEL}", *flags, f"--http={http}", f"--grpc={grpc}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_ready(f"http://{http}/ready")
            yield f"http://{http}"
        finally:
            process.terminate()
    for port in ports:
        port.close()


def wait_ready(url: str, within_s: float = READY_S) -> None:
    """Raises TimeoutError."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=1.0) as answer:
            if answer.status == 200:
                return
        time.sleep(0.2)
    raise TimeoutError(f"{url}: not ready within {within_s:g} s")


def call(command: list[str], out: Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=out)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def baton_bench(settings: AgreementSettings, url: str, out: Path) -> Measured:
    trace, result = out / "trace.jsonl", out / "result.json"
    request = {"input_length": INPUT_TOKENS, "output_length": OUTPUT_TOKENS}
    lines = [
        {"timestamp": round(i * 1e3 / settings.request_rate), **request, "hash_ids": [i]}
        for i in range(settings.num_prompts)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    seed = int(out.name.rpartition("-")[2]) + 1  # a seed's prompts are in the prefix cache afterwards
    flags = [f"--url={url}", "--workload=trace", f"--trace-file={trace}", f"--seeds={seed}"]
    flags += ["--ignore-eos", "--no-progress"]
    call([sys.executable, "-m", "deploy.command", "bench", *flags, f"--result-file={result}"], Path.cwd())
    (run,) = json.loads(result.read_text())["runs"].values()
    return {
        "requests/s": run["requests_per_s"],
        "output tokens/s": run["output_tokens_per_s"],
        "TTFT mean": run["ttft_ms"]["mean"],
        "TTFT p50": run["ttft_ms"]["p50"],
        "ITL mean": run["tpot_ms"]["mean"],
        "latency mean": run["e2e_ms"]["mean"],
    }


def aiperf(settings: AgreementSettings, url: str, out: Path) -> Measured:
    """Its inter-token latency is what baton bench and vLLM call TPOT: of a request, from its first token on."""
    load = [f"--request-rate={settings.request_rate}", "--arrival-pattern=constant"]
    load += [f"--request-count={settings.num_prompts}", "--warmup-request-count=3"]
    load += [f"--isl={INPUT_TOKENS}", "--isl-stddev=0", f"--osl={OUTPUT_TOKENS}", "--osl-stddev=0"]
    server = [f"--model={MODEL}", f"--url={url}", "--endpoint-type=completions", "--streaming"]
    server += ["--extra-inputs", "ignore_eos:true", f"--tokenizer={EMBEDDED[MODEL]}", "--use-server-token-count"]
    call([str(settings.aiperf), "profile", *server, *load, "--ui=none", f"--artifact-dir={out}"], out)
    profile = json.loads((out / "profile_export_aiperf.json").read_text())
    return {
        "requests/s": profile["request_throughput"]["avg"],
        "output tokens/s": profile["output_token_throughput"]["avg"],
        "TTFT mean": profile["time_to_first_token"]["avg"],
        "TTFT p50": profile["time_to_first_token"]["p50"],
        "ITL mean": profile["inter_token_latency"]["avg"],
        "latency mean": profile["request_latency"]["avg"],
    }


def guidellm(settings: AgreementSettings, url: str, out: Path) -> Measured:
    result = out / "result.json"
    command = [
        *(str(settings.guidellm), "run", "--disable-progress"),
        *("--backend", f"kind=openai_http,target={url},model={MODEL},request_format=/v1/completions"),
        *("--profile", f"kind=constant,rate={settings.request_rate}"),
        *("--constraint", f"kind=max_requests,count={settings.num_prompts}"),
        *("--tokenizer", f"kind=hf_auto,model={EMBEDDED[MODEL]}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={INPUT_TOKENS},output_tokens={OUTPUT_TOKENS}"),
        *("--output", f"kind=json,path={result}"),
    ]
    call(command, out)
    metrics: dict[str, Any] = json.loads(result.read_text())["benchmarks"][0]["metrics"]
    figures = {name: value["successful"] for name, value in metrics.items() if value and "successful" in value}
    return {
        "requests/s": figures["requests_per_second"]["mean"],
        "output tokens/s": figures["output_tokens_per_second"]["mean"],
        "TTFT mean": figures["time_to_first_token_ms"]["mean"],
        "TTFT p50": figures["time_to_first_token_ms"]["median"],
        "ITL mean": figures["inter_token_latency_ms"]["mean"],
        "latency mean": figures["request_latency"]["mean"] * 1e3,
    }


if __name__ == "__main__":
    main()
