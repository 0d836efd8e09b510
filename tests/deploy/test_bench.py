"""`baton bench` against a stub with known delays, and the parts that decide."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import ssl
import statistics
from pathlib import Path
from random import Random
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.settings import EXIT_USAGE, parse
from deploy.bench.arrivals import arrival_times
from deploy.bench.client import Answer, Client, RequestFailed, Target, _Events
from deploy.bench.figures import figures
from deploy.bench.goodput import Limits, highest_rate
from deploy.bench.load import Outcome, run_load
from deploy.bench.main import Bench, main
from deploy.bench.page import page
from deploy.bench.plan import PlannedRequest, Planner
from deploy.bench.report import as_json, report
from deploy.bench.settings import BenchSettings
from deploy.bench.stats import percentile, summary
from deploy.bench.trace import read_trace
from tests.certificates import Certificate, make_certificate

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
        assert expected_s * 1e3 - 1 < run[name]["p50"] < expected_s * 1e3 * 2
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


def test_a_failed_request_is_not_within_limits():
    good = Outcome(0, 0, 1, (0.1, 0.2, 0.3), output_tokens=3)
    late = Outcome(0, 0, 1, (0.6, 0.7), output_tokens=2)
    slow = Outcome(0, 0, 1, (0.1, 0.9), output_tokens=2)
    assert Limits(0.5, 0.15).share([good, late, slow, Outcome(0, 0, 0, error="timeout")]) == 0.25


@given(st.floats(0.2, 60))
def test_the_search_ends_close_below_the_highest_rate(limit):
    async def attains(rate: float) -> bool:
        return rate <= limit

    found = asyncio.run(highest_rate(attains, 0.125, 64.0, 10))
    assert found <= limit <= found * 1.01


async def test_the_search_knows_both_ends():
    async def never(rate: float) -> bool:
        return False

    async def always(rate: float) -> bool:
        return True

    assert await highest_rate(never, 1, 2, 3) == 0
    assert await highest_rate(always, 1, 2, 3) == 2


async def test_the_offered_rate_of_conversations_is_told():
    """Later turns come after a time to think: a short run offers less than was asked for."""
    flags = ("--workload=multi-turn", "--think-time=0.2", "--num-turns=4", "--num-prompts=40", "--num-warmups=0")
    search = ("--goodput-ttft=5", "--goodput-itl=5", "--goodput-min-rate=200", "--goodput-max-rate=400")
    async with Stub() as stub:
        results = await results_of(stub, *flags, *search, "--seeds=1,2")
    assert results.goodput is not None
    assert results.goodput["per_seed"] == [400, 400]
    for seed, offered in zip((1, 2), results.goodput["offered_per_s"], strict=True):
        (trial,) = (trial for trial in results.goodput["trials"][f"seed {seed}"] if trial["rate"] == 400)
        dues = [outcome.due for outcome in results.outcomes[f"seed {seed}, trial 2 at 400.000/s"]]
        assert offered == trial["offered_per_s"] == pytest.approx(39 / max(dues))
        assert offered < 300
    assert f"{results.goodput['offered_per_s'][1]:.2f} offered" in report(results.runs, results.goodput, {})


async def test_goodput_is_the_median_of_the_seeds():
    async with Stub() as stub:
        flags = ("--goodput-ttft=5", "--goodput-itl=5", "--goodput-max-rate=400", "--goodput-min-rate=200")
        results = await results_of(stub, *flags, "--seeds=1,2", "--num-prompts=2", "--num-warmups=0")
    assert results.goodput is not None
    assert results.goodput["requests_per_s"] == 400
    assert [trial["share"] for trial in results.goodput["trials"]["seed 1"]] == [1, 1]


@pytest.mark.parametrize(
    ("per_seed", "told"),
    [
        ([64.0, 64.0], "64.000 or more requests/s (median of 64.000 or more, 64.000 or more; offered: 31.500, 29.000)"),
        ([0.0], "less than 0.125 requests/s (median of less than 0.125; offered: 31.500)"),
        ([2.0, 8.0], "2.000 requests/s (median of 2.000, 8.000; offered: 31.500, 29.000)"),
    ],
)
def test_goodput_beyond_the_rates_that_were_tried_is_a_bound(per_seed, told):
    rates = {"requests_per_s": statistics.median_low(per_seed), "per_seed": per_seed, "offered_per_s": [31.5, 29.0]}
    rates["offered_per_s"] = rates["offered_per_s"][: len(per_seed)]
    assert report({}, {**rates, "min_rate": 0.125, "max_rate": 64.0}, {}) == f"goodput: {told}"


@pytest.mark.parametrize(("kept", "found"), [((0, 64), 0), ((8, 64), 8), ((64, 8), 8), ((2, 64, 64), 64)])
async def test_goodput_is_a_rate_that_was_tried_or_a_bound(kept, found):
    """Not the mean of a rate and a bound."""
    settings = settings_of(
        "http://a", "--goodput-ttft=5", "--goodput-itl=5", f"--seeds={','.join(map(str, range(1, len(kept) + 1)))}"
    )
    bench = Bench(settings, Planner(settings))

    async def measure(name, seed, rate):
        bench.results.runs[name] = {"offered_per_s": rate}
        return [Outcome(0, 0, 1, (0.1,), error="" if rate <= kept[seed - 1] else "late")]

    with patch.object(bench, "_measure", measure):
        goodput = await bench._search()
    assert goodput["requests_per_s"] in (*goodput["per_seed"], 0)
    assert goodput["requests_per_s"] == pytest.approx(found, rel=0.1)


async def test_rates_that_are_almost_the_same_have_prompts_of_their_own():
    async with Stub() as stub:
        flags = ("--goodput-ttft=5", "--goodput-itl=5", "--goodput-steps=2")
        close = ("--goodput-min-rate=400", "--goodput-max-rate=400.0001")
        settings = settings_of(stub.url, *flags, *close, "--seeds=1", "--num-prompts=1", "--num-warmups=0")
        bench = Bench(settings, Planner(settings))
        with patch.object(Limits, "share", side_effect=[1, 0, 1, 0]):
            results = await bench.run()
    assert len(results.runs) == 4
    assert len({body["prompt"] for body in stub.bodies}) == 4


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
