"""`baton top` against a small HTTP server that answers as a router would."""

from __future__ import annotations

import copy
import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from typing import Any

import pytest
from pydantic import SecretStr
from rich.console import Console

from baton.settings import SettingsError, load
from deploy.top import main as top
from deploy.top.history import History
from deploy.top.settings import TopSettings
from deploy.top.source import NoAnswer, Source
from deploy.top.view import plain, seconds, size, view

KEY = "sk-one"
LOAD = {"num_waiting": 2, "num_running": 3, "num_blocks_free": 25, "num_blocks_total": 100}


def node(name: str, role: str, **more: Any) -> dict[str, Any]:
    fields = {"address": f"{name}:1", "role": role, "state": "up", "problem": None, "node_id": name}
    return {**fields, "incarnation": f"i-{name}", "load": LOAD, "num_seats": 8, **more}


def snapshot_at(at: float, tokens: int = 0, first: tuple[int, ...] = (), num_bytes: int = 0) -> dict[str, Any]:
    """Of a router with a pair of nodes. `first`: counts of its histogram of first tokens, bounds 0.1 and 0.2 s."""
    flows = [{"source": "i-p", "target": "i-d", "num_bytes": num_bytes, "num_handoffs": 1}] if num_bytes else []
    work = {
        "requests": {"queued": 1, "decoding": 4, "prefilling": 0},
        "num_ended": {"failed": 7},
        "num_prompt_tokens": 2 * tokens,
        "num_generation_tokens": tokens,
        "first_token_s": {"bounds": [0.1, 0.2] if first else [], "counts": list(first)},
        "inter_token_s": {"bounds": [], "counts": []},
        "num_tokens_by_node": {"i-p": 2 * tokens, "i-d": tokens},
        "flows": flows,
    }
    state = {"version": "1.2.3", "status": "ready", "is_ready": True, "bottleneck": "decode", "num_workers_answered": 1}
    nodes = [node("p", "prefill"), node("d", "decode")]
    return {**state, "at": at, "nodes": nodes, "unpaired": [], "problems": [], "work": work}


class FakeRouter:
    """Gives `answers` in turn, the last one for ever; a number is a status."""

    def __init__(self) -> None:
        self.answers: list[dict[str, Any] | int] = []
        self.seen: list[str | None] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                fake.seen.append(self.headers["authorization"])
                answer = fake.answers.pop(0) if len(fake.answers) > 1 else fake.answers[0]
                body = json.dumps({} if isinstance(answer, int) else answer).encode()
                status = answer if isinstance(answer, int) else 200
                self.send_response(status if self.path == "/debug/console" else 404)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Says nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    fake = FakeRouter()
    thread = threading.Thread(target=fake.server.serve_forever, args=(0.01,))
    thread.start()
    yield fake
    fake.server.shutdown()
    fake.server.server_close()
    thread.join(10)


def rendered(snapshot: dict[str, Any], history: History | None = None, trouble: str = "") -> str:
    console = Console(file=StringIO(), width=120)
    console.print(view(snapshot, history or History(), "http://r", trouble))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def row_of(text: str, name: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.split()[:1] == [name]]
    return line.split()


def test_a_worker_that_began_again_unseen_makes_no_quantiles_of_less_than_nothing() -> None:
    history = History()
    history.add(snapshot_at(10.0, 1000, (50, 0, 50)))
    history.add(snapshot_at(70.0, 1100, (3, 9, 60)))  # more tokens in all, by the other worker
    assert math.isnan(history.quantile("first_token_s", 0.5))
    history.add(snapshot_at(71.0, 1200, (3, 13, 60)))
    assert history.quantile("first_token_s", 1.0) == pytest.approx(0.2)


# ---- the command ----


def test_one_table_where_the_output_is_no_terminal(router: FakeRouter, capsys: pytest.CaptureFixture[str]) -> None:
    router.answers = [snapshot_at(10.0), snapshot_at(12.0, 100, (4, 4, 0), 8_000_000)]
    top.main(["--url", f"{router.url}/v1/", "--interval=0.1"])
    text = capsys.readouterr().out
    assert len(router.seen) == 2
    assert f"baton 1.2.3  {router.url}  ready" in text
    assert "5 in flight (1 queued, 4 decoding), 7 failed since the start; bottleneck decode" in text
    assert "TTFT median 100 ms, p99 198 ms; ITL median -, p99 -; 50 output and 100 prompt tokens/s" in text
    assert row_of(text, "d") == ["d", "decode", "up", "75%", "3", "2", "50", "4", "MB/s"]
    assert row_of(text, "p")[6] == "100"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (401, "wants a key: --api-key, or BATON_API_KEY"),
        (404, "is no baton router, or an older one"),
        (503, "answers with 503"),
        ({"hello": 1}, "is not a baton router's"),
    ],
)
def test_what_is_no_answer_exits_with_1(
    router: FakeRouter, capsys: pytest.CaptureFixture[str], answer: Any, why: str
) -> None:
    router.answers = [answer]
    with pytest.raises(SystemExit) as ended:
        top.main(["--url", router.url, "--once"])
    assert ended.value.code == 1
    assert why in capsys.readouterr().err


def test_a_router_that_is_gone_is_named(router: FakeRouter) -> None:
    router.server.server_close()
    with pytest.raises(NoAnswer, match=f"no answer from {router.url}") as refused:
        Source(TopSettings(url=router.url)).snapshot()
    assert not refused.value.final, "it may come back"


def test_the_key_is_sent(router: FakeRouter) -> None:
    router.answers = [snapshot_at(1.0)]
    Source(TopSettings(url=router.url, api_key=SecretStr(KEY))).snapshot()
    assert router.seen == [f"Bearer {KEY}"]


def test_on_a_terminal_it_goes_on_after_a_failure(router: FakeRouter) -> None:
    """Until the router refuses for good."""
    router.answers = [snapshot_at(1.0), 503, snapshot_at(2.0, 5), 401]
    console = Console(file=StringIO(), force_terminal=True, width=120)
    with pytest.raises(NoAnswer, match="wants a key"):
        top._watch(TopSettings(url=router.url, interval=0.1), console)
    assert isinstance(console.file, StringIO)
    shown = console.file.getvalue()
    assert "answers with 503" in shown
    assert "5 output and" in shown


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"url": "localhost:8000"}, "--url: must be http://HOST:PORT"),
        ({"interval": 0.01}, "--interval"),
    ],
)
def test_bad_flags_are_named(flags: dict[str, Any], why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        load(TopSettings, flags)


# ---- what it shows ----


def test_each_state_of_a_node_and_why() -> None:
    shown = snapshot_at(1.0)
    gone = {"incarnation": None, "node_id": None, "load": None, "state": "connecting"}
    shown["nodes"] += [
        node("drains", "decode", state="draining", problem="is drained, and finishes what it has"),
        node("gone", "decode", **gone, problem="silent for 5 s"),
        node("new", "decode", **gone, problem="not reached yet"),
        node("stops", "decode", state="stopping", problem="is stopping"),
        node("odd", "decode", state="incompatible", problem="fits none: LayoutMismatch"),
        node("fails", "decode", state="avoided", problem="CUDA error"),
    ]
    shown["problems"] = ["--nodes-file: gone"]
    text = rendered(shown)
    told = {"drains": "draining", "stops": "stopping", "odd": "incompatible", "fails": "avoided", "p": "up", "d": "up"}
    for name, state in {**told, "gone:1": "down", "new:1": "connecting"}.items():
        assert row_of(text, name)[2] == state
    for why in ("silent for 5 s", "LayoutMismatch", "CUDA error", "--nodes-file: gone"):
        assert why in text


def test_names_cannot_write_to_the_terminal() -> None:
    shown = snapshot_at(1.0)
    shown["nodes"][0]["node_id"] = "evil\x1b[2J[red]x"
    text = rendered(shown)
    assert "\x1b" not in text
    assert "evil?[2J[red]x" in text
    assert plain("a\tb\n") == "a?b?"


def test_trouble_stands_below_the_last_answer() -> None:
    assert rendered(snapshot_at(1.0), trouble="no answer from http://r").rstrip().endswith("no answer from http://r")


def test_units() -> None:
    assert [seconds(value) for value in (0.0123, 2.5, math.nan)] == ["12.3 ms", "2.5 s", "-"]
    assert [size(value) for value in (0, 999, 5_300_000, 2e15)] == ["0 B", "999 B", "5.3 MB", "2e+03 TB"]


# ---- differences ----


def test_rates_and_percentiles_are_of_the_last_seconds() -> None:
    history = History()
    for second in range(40):
        history.add(snapshot_at(float(second), 10 * second, (second, 0, 0), 100 * second))
    history.add(snapshot_at(40.0, 390 + 160, (39, 0, 15), 3900 + 1600))
    assert history.rate("num_generation_tokens") == pytest.approx((14 * 10 + 160) / 15)
    assert history.kv_rates() == {name: pytest.approx((14 * 100 + 1600) / 15) for name in ("i-p", "i-d")}
    assert history.quantile("first_token_s", 0.99) == 0.2, "above the last bound: no more is known"
    assert math.isnan(history.quantile("inter_token_s", 0.5))


def test_a_node_that_was_away_has_no_negative_rate() -> None:
    history = History()
    for at, tokens in ((1.0, 500), (2.0, 20), (3.0, 50)):
        shown = snapshot_at(at, 1000)
        shown["work"]["num_tokens_by_node"] = {"i-d": tokens}
        history.add(shown)
    assert history.token_rates() == {"i-d": 15.0}


def test_a_router_that_began_anew_counts_from_there() -> None:
    history = History()
    for at, tokens in ((1.0, 1000), (2.0, 10), (3.0, 30)):
        history.add(snapshot_at(at, tokens))
    assert history.rate("num_generation_tokens") == 20
    lacking = copy.deepcopy(snapshot_at(4.0, 5000))
    lacking["num_workers_answered"] = 2
    history.add(lacking)
    assert history.rate("num_generation_tokens") == 20, "a worker answers again: its totals are not new"
