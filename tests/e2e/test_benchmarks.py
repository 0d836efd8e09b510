"""The benchmarks run, check answers, and end with one JSON line. Not how fast anything is."""

from __future__ import annotations

import json
import statistics
from random import Random
from typing import Any

import pytest

from baton.address import HostPort
from benchmarks.harness.checks import WrongAnswers, check_concurrency
from benchmarks.harness.cluster import Addresses
from benchmarks.harness.http_stream import Connection, RequestFailed, Streamed
from benchmarks.harness.load import Load, Prompts
from benchmarks.router import overhead
from benchmarks.serving import streams
from deploy.bench.stats import median_interval, percentile, table
from tests.e2e.conftest import House

pytestmark = pytest.mark.timeout(300)


def http_of(house: House) -> HostPort:
    return HostPort.parse(house.chunk_2048.url.removeprefix("http://"))


async def test_serve(house: House, capsys: pytest.CaptureFixture[str]) -> None:
    settings = streams.StreamsSettings(
        url=house.chunk_2048.url, concurrency=4, num_prompts=6, input_len=40, output_len=8, tie_tolerance=1e-4
    )
    line = json.loads(json.dumps(await streams.run(settings)))
    assert (line["benchmark"], line["model"], line["num_prompts"]) == ("serve", "baton-tiny", 6)
    assert line["num_recalled"] >= 7
    assert 0 < line["ttft_ms_p50"] <= line["ttft_ms_p99"] < line["e2e_ms_p99"]
    assert line["output_tokens_per_s"] == pytest.approx(48 / line["duration_s"], rel=0.01)
    assert "TTFT, alone" in capsys.readouterr().out
    house.wait_whole()


async def test_serve_as_requests_come(house: House, capsys: pytest.CaptureFixture[str]) -> None:
    sizes: dict[str, Any] = {"num_prompts": 6, "input_len": 40, "output_len": 8, "tie_tolerance": 1e-4}
    limits = "ttft:100000,gap:100000"
    settings = streams.StreamsSettings(url=house.chunk_2048.url, request_rate=40, goodput=limits, **sizes)
    line = json.loads(json.dumps(await streams.run(settings)))
    assert (line["request_rate"], line["concurrency"], line["num_prompts"]) == (40, None, 6)
    assert line["attainment"] == 1
    assert line["itl_ms_p50"] <= line["longest_gap_ms_p50"] <= line["e2e_ms_p99"]
    assert 0 <= line["first_gap_ms_p50"] <= line["longest_gap_ms_p99"]  # 0: of one event, where the router was behind
    assert line["scatter_ms_p50"] <= line["transfer_ms_p50"] <= line["handoff_ms_p50"]
    parts = sum(line[f"{part}_ms_mean"] for part in ("commit", "transfer", "step_wait"))
    assert line["handoff_ms_mean"] == pytest.approx(parts, abs=0.01)
    assert 0 <= line["wire_ms_p50"] < line["e2e_ms_p99"]
    out = capsys.readouterr().out
    assert "requests/s, sent at most" in out
    assert line["sent_late_ms"] < 1e3 * line["duration_s"]
    assert "100.0% of the requests keep" in out
    house.wait_whole()


@pytest.mark.parametrize("goodput", ["ttft", "ttft:x", "speed:3"])
def test_limits_that_make_no_sense(goodput: str) -> None:
    with pytest.raises(ValueError, match="goodput"):
        streams.StreamsSettings(goodput=goodput)


async def test_router_overhead(house: House, capsys: pytest.CaptureFixture[str]) -> None:
    settings = overhead.OverheadSettings(num_pairs=6, input_len=20)
    addresses = Addresses(http_of(house), [house.nodes[1].address], [house.nodes[2].address])
    measured = await overhead.measure(settings, addresses)
    overhead.report(settings, measured)
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["benchmark"] == "router_overhead"
    assert line["added_ms_p50"] == pytest.approx(statistics.median(measured.differences) * 1e3, abs=0.01)
    house.wait_whole()


class _Liar(Load):
    """Whose answers among others differ."""

    async def send(self, path: str, bodies: object, concurrency: int) -> list[Streamed]:
        tokens = [1, 2, 3] if concurrency == 1 else [1, 2, 4]
        return [Streamed(0.0, tokens=tokens, margins=[0.5] * 3) for _ in range(8)]


async def test_wrong_answers_are_found() -> None:
    liar = _Liar(HostPort("127.0.0.1", 1), Prompts(range(5, 100), 0), 10, 3)
    with pytest.raises(WrongAnswers, match="8 of 8"):
        await check_concurrency(liar, 2, tolerance=0.1)
    assert (await check_concurrency(liar, 2, tolerance=0.5))["num_near_ties"] == 8


async def test_errors_are_told(house: House) -> None:
    async with Connection(http_of(house)) as connection:
        with pytest.raises(RequestFailed, match="maximum context length"):
            await connection.stream("/v1/completions", {"prompt": [5] * 5000})
        with pytest.raises(RequestFailed, match="nothing at"):
            await connection.ask("/nowhere")
        assert (await connection.ask("/health"))["status"] == "ok"


def test_statistics() -> None:
    assert percentile([1, 2, 3, 4], 50) == 2.5
    assert [percentile([7], p) for p in (0, 50, 99)] == [7, 7, 7]
    assert median_interval([1, 2, 3]) == (1, 3)
    rng = Random(1)
    hits = 0
    for _ in range(400):
        low, high = median_interval([rng.gauss(5, 1) for _ in range(41)])
        hits += low <= 5 <= high
    assert hits >= 0.94 * 400
    assert table({"a": {"mean": 1.0}, "bc": {"mean": 1000.0}}, "ms").splitlines()[2].endswith("1000.0")
