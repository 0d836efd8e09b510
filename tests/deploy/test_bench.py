"""`baton bench` against a stub with known delays, and the parts that decide."""

from __future__ import annotations

import asyncio
import gc
import json
import math
from pathlib import Path
from random import Random
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.settings import EXIT_USAGE
from deploy.bench.arrivals import arrival_times
from deploy.bench.client import Answer, Client, RequestFailed, Target, _Events
from deploy.bench.figures import figures
from deploy.bench.load import Outcome, run_load
from deploy.bench.main import Bench, main
from deploy.bench.page import page
from deploy.bench.plan import PlannedRequest, Planner
from deploy.bench.report import as_json, report
from deploy.bench.stats import percentile, summary
from deploy.bench.trace import read_trace
from tests.certificates import make_certificate
from tests.deploy.bench_stub import FIRST_S, GAP_S, TOKENS, Stub, event, results_of, settings_of


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
async def test_figures_are_those_of_the_stub(endpoint):
    """Delays may be exceeded by as much as a busy machine delays, never undercut: 1 ms is the clock's."""
    async with Stub() as stub:
        flags = (f"--endpoint={endpoint}", "--seeds=1,2", "--num-prompts=6", "--request-rate=50", "--num-warmups=1")
        results = await results_of(stub, *flags)
    assert len(stub.bodies) == 2 * 6 + 1
    assert [run["completed"] for run in results.runs.values()] == [6, 6]
    run = results.runs["seed 1"]
    assert (run["input_tokens"], run["cached_tokens"], run["output_tokens"]) == (6 * 7, 6 * 3, 6 * TOKENS)
    assert "43% of the prompt tokens were in the server's prefix cache" in report(results.runs, None, {})
    for name, expected_s in {"ttft_ms": FIRST_S, "itl_ms": GAP_S, "tpot_ms": GAP_S}.items():
        assert expected_s * 1e3 - 1 < run[name]["p50"] < expected_s * 1e3 + 1000
    assert run["e2e_ms"]["p50"] > (FIRST_S + (TOKENS - 1) * GAP_S) * 1e3 - 1


def test_tokens_that_no_server_counted_are_told():
    uncounted = Outcome(0, 0, 1, (0.1, 0.2), output_tokens=2)
    counted = Outcome(1, 1, 2, (1.1, 1.2), input_tokens=7, output_tokens=5)
    told = figures([uncounted, counted, Outcome(1, 1, 2, error="timeout")])
    assert (told["without_usage"], told["input_tokens"], told["output_tokens"]) == (1, 7, 7)
    assert "1 answers came without usage" in report({"seed 1": told}, None, {})
    assert "without usage" not in report({"seed 1": figures([counted])}, None, {})


async def test_as_many_warm_ups_are_sent_as_asked_for():
    async with Stub() as stub:
        await results_of(stub, "--seeds=1", "--num-prompts=1", "--num-warmups=3")
    assert len(stub.bodies) == 3 + 1


async def test_refused_requests_are_counted_by_kind():
    async with Stub(refuse=3) as stub:
        results = await results_of(stub, "--seeds=1", "--num-prompts=9", "--request-rate=500", "--num-warmups=0")
    run = results.runs["seed 1"]
    assert (run["completed"], run["failed"], run["errors"]) == (6, 3, {"http_429": 3})
    assert results.details["http_429"].endswith("busy")


async def test_a_stream_without_its_end_has_failed():
    async with Stub(cut=True) as stub:
        results = await results_of(stub, "--seeds=1", "--num-prompts=2", "--request-rate=500", "--num-warmups=0")
    assert results.runs["seed 1"]["errors"] == {"disconnected": 2}


async def test_a_request_out_of_time_has_failed():
    async with Stub() as stub:
        client = Client(Target(stub.url))
        with pytest.raises(RequestFailed) as failed:
            await client.stream("completions", {}, FIRST_S / 4)
    assert failed.value.kind == "timeout"


async def test_a_server_that_is_not_there_is_a_failure():
    async with Stub() as stub:
        url = stub.url
    with pytest.raises(RequestFailed) as failed:
        await Client(Target(url)).get("models", 5.0)
    assert failed.value.kind == "connect"


def test_a_server_that_is_not_there_is_named(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--url=http://127.0.0.1:1"])
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("baton bench: http://127.0.0.1:1: connect: ")


async def test_a_server_with_tls_must_be_of_a_known_authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    certificate = make_certificate(tmp_path)
    async with Stub(tls=certificate) as stub:
        with pytest.raises(RequestFailed, match="certificate verify failed") as failed:
            await Client(Target(stub.url)).get("models", 5.0)
        assert failed.value.kind == "connect"
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate.ca_certs))
        results = await results_of(stub, "--seeds=1", "--num-prompts=3", "--request-rate=500")
    assert results.runs["seed 1"]["completed"] == 3


async def test_connections_are_used_again():
    async with Stub() as stub:
        client = Client(Target(stub.url))
        for _ in range(3):
            await client.stream("completions", {}, 10.0)
        client.close()
    assert stub.connections == 1


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--url=ftp://x"], "--url: must be http"),
        (["--url=http://x:port"], "--url: must be http"),
        (["--arrival=never"], "--arrival"),
        (["--seeds=1,1"], "--seeds: must be one or more different"),
        (["--workload=trace"], "--trace-file: needed"),
        (["--goodput-ttft=1"], "--goodput-ttft, --goodput-itl"),
        (["--workload=multi-turn", "--arrival=fixed"], "--arrival"),
        (["--workload=trace", "--trace-file=/no/such/file"], "--trace-file"),
        (["--workload=trace", "--trace-file=/no/such/file", "--arrival=burst"], "--arrival"),
        (["--goodput-ttft=1", "--goodput-itl=1", "--request-rate=4"], "--request-rate"),
        (["--result-file=/no/such/folder/result.json"], "--result-file: cannot write"),
        (["--html-file=/"], "--html-file: cannot write"),
        (["--url=http://a..b"], "--url: must be http"),
        (["--workload=multi-turn", "--think-time=inf"], "--think-time"),
        (["--api-key=schlüssel"], "--api-key: must be printable"),
        (["--api-key=a\nb: c"], "--api-key: must be printable"),
    ],
)
def test_bad_flags_exit_with_2(flags, told, capsys):
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_a_password_in_the_url_is_refused_and_not_shown(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--url=http://me:s3cret@127.0.0.1:1"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "--url: must be http" in told
    assert "s3cret" not in told


@pytest.mark.parametrize("timestamp", ["NaN", "Infinity", "-1"])
def test_a_trace_has_times_that_can_be(timestamp, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(f'{{"timestamp": {timestamp}, "input_length": 5, "output_length": 2, "hash_ids": [1]}}\n')
    with pytest.raises(ValueError, match="line 1: timestamp must be 0 or more"):
        read_trace(path)


@given(st.sampled_from(["poisson", "fixed", "burst"]), st.integers(1, 200), st.floats(0.01, 1e4), st.integers(1, 50))
def test_arrivals_ascend_from_0_and_follow_from_their_seed(kind, count, per_s, burst_size):
    times = arrival_times(kind, count, per_s, burst_size, 1)
    assert len(times) == count
    assert times[0] == 0
    assert times == sorted(times) == arrival_times(kind, count, per_s, burst_size, 1)


@pytest.mark.parametrize("kind", ["poisson", "fixed", "burst"])
def test_arrivals_have_the_rate_asked_for(kind):
    assert arrival_times(kind, 4001, 20.0, 8, 3)[-1] == pytest.approx(200, rel=0.05)


def test_a_burst_arrives_at_once():
    assert arrival_times("burst", 6, 2.0, 3, 1) == [0, 0, 0, 1.5, 1.5, 1.5]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1))
def test_percentiles_are_ordered_and_within_the_values(values):
    told = summary(values)
    assert min(values) <= told["p50"] <= told["p90"] <= told["p99"] <= max(values)
    assert (percentile(values, 0), percentile(values, 100)) == (min(values), max(values))


def test_each_runs_prompts_are_its_own_and_repeat():
    settings = settings_of("http://x", "--workload=shared-prefix", "--prefix-len=512", "--num-prefixes=1")
    planner = Planner(settings)

    def prompts(run: str) -> list[str]:
        return [request.body["prompt"] for request in planner.plan("m", 1, run, 2.0)]

    assert prompts("a") == prompts("a")
    shared = {" ".join(prompt.split()[:512]) for prompt in prompts("a")}
    assert len(shared) == 1
    assert not set(prompts("a")) & set(prompts("b"))


def test_a_trace_keeps_its_times_and_lengths(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 1000, "input_length": 3, "output_length": 2, "hash_ids": [1]},
        {"timestamp": 1500, "input_length": 600, "output_length": 4, "hash_ids": [1, 2]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    planner = Planner(settings_of("http://x", "--workload=trace", f"--trace-file={path}"))
    first, second = planner.plan("m", 1, "a", None)
    assert (first.at, second.at) == (0, 0.5)
    assert (first.body["max_tokens"], second.body["max_tokens"]) == (2, 4)
    assert (len(first.body["prompt"].split()), len(second.body["prompt"].split())) == (3, 600)
    assert second.body["prompt"].startswith(first.body["prompt"])
    assert [request.at for request in planner.plan("m", 1, "a", 4.0)] != [0, 0.5]


async def test_every_planned_request_has_an_outcome():
    async def fail(_):
        raise RequestFailed("http_500", "no")

    ended: list[Outcome] = []
    outcomes = await run_load([PlannedRequest(0.0, {})] * 3, fail, ended.append)
    assert [outcome.error for outcome in outcomes] == ["http_500"] * 3
    assert sorted(ended, key=id) == sorted(outcomes, key=id)
    told = figures(outcomes)
    assert (told["completed"], told["errors"]) == (0, {"http_500": 3})
    assert math.isnan(told["ttft_ms"]["p50"])


async def test_no_garbage_collection_of_what_was_there_stops_a_run():
    frozen: list[int] = []

    async def send(_):
        frozen.append(gc.get_freeze_count())
        raise RequestFailed("http_500", "no")

    made = [[] for _ in range(10_000)]
    before = gc.get_freeze_count()
    await run_load([PlannedRequest(0.0, {})], send, lambda _: None)
    assert frozen[0] >= before + len(made)


def test_results_tell_an_infinite_rate_from_none():
    stated = json.loads(as_json({"request_rate": math.inf, "unset": None, "p99": [math.nan, 1.5]}))
    assert stated == {"request_rate": "inf", "unset": None, "p99": [None, 1.5]}


def test_ctrl_c_reports_the_runs_that_are_over(capsys):
    async def run(bench: Bench) -> None:
        bench.results.runs["seed 1"] = figures([Outcome(0, 0, 1, (0.5, 1), output_tokens=2)])
        raise KeyboardInterrupt

    with patch.object(Bench, "run", run), pytest.raises(SystemExit) as ended:
        main(["--url=http://127.0.0.1:1"])
    assert ended.value.code == 130
    told = capsys.readouterr()
    assert "seed 1: 1 answered" in told.out
    assert told.err == "baton bench: interrupted\n"


def test_the_page_is_self_contained():
    random = Random(1)
    outcomes = [Outcome(at, at, at + 1, (at + random.random(), at + 1), output_tokens=2) for at in range(20)]
    text = page("a <title>", "report & figures", {"seed 1": outcomes, "seed 2": []})
    assert "a &lt;title&gt;" in text
    assert text.count("<svg") == 5
    assert "http" not in text
    assert "nan" not in text


@pytest.mark.parametrize(("refuse", "flags", "code"), [(0, [], 0), (2, [], 1), (2, ["--allow-failures"], 0)])
async def test_the_command_reports_and_exits(refuse, flags, code, tmp_path, capsys):
    result, html, picture = (tmp_path / name for name in ("result.json", "report.html", "report.png"))
    flags = [*flags, f"--result-file={result}", f"--html-file={html}", f"--png-file={picture}"]
    async with Stub(refuse=refuse) as stub:
        argv = [f"--url={stub.url}/v1", "--seeds=1", "--num-prompts=4", "--request-rate=500", "--num-warmups=0"]
        with pytest.raises(SystemExit) as ended:
            await asyncio.to_thread(main, [*argv, *flags])
    assert ended.value.code == code
    stated = json.loads(result.read_text())
    assert stated["model"] == "stub"
    assert stated["settings"]["num_prompts"] == 4
    assert stated["runs"]["seed 1"]["failed"] == (2 if refuse else 0)
    assert "TTFT" in capsys.readouterr().out
    assert "<svg" in html.read_text()
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_pictures_need_matplotlib(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("deploy.bench.main.is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        main(["--url=http://127.0.0.1:1/v1", f"--png-file={tmp_path / 'report.png'}"])
    assert ended.value.code == EXIT_USAGE
    assert "baton-serve[plots]" in capsys.readouterr().err


def test_a_finish_reason_ends_an_answer_too():
    """`transformers serve` sends no [DONE]."""
    answer = Answer(0.0)
    events = _Events(answer)
    events.take(event({"choices": [{"delta": {"content": "x"}, "finish_reason": None}]}))
    assert not answer.done
    usage = {"prompt_tokens": 7, "completion_tokens": 2}
    events.take(event({"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": usage}))
    events.finish()
    assert (len(answer.arrivals), answer.output_tokens, answer.cached_tokens) == (1, 2, None)


def test_a_whole_body_without_done_has_failed():
    events = _Events(Answer(0.0, arrivals=[0.1]))
    with pytest.raises(RequestFailed) as failed:
        events.finish()
    assert failed.value.kind == "disconnected"
