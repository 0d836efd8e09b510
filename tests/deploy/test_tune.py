"""`baton tune`: figures come from pages as processes write them, and become proposals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from rich.console import Console

from baton.address import HostPort
from baton.messages import Load
from baton.node_info import NodeRole
from baton.telemetry import ROUTER, AdminGate, MetricsServer, NodeMetrics, RouterMetrics, new_registry
from baton.telemetry.pools import PoolState
from deploy.tune import main, report, sources
from deploy.tune.figures import Figures, figures
from deploy.tune.pages import Page, Window, windows
from deploy.tune.settings import TuneSettings

# ---- figures ----


def router_pages() -> list[Page]:
    """Before and after a run."""
    registry = new_registry(ROUTER)
    metrics = RouterMetrics(registry)
    pages = []
    for number in (0, 10):
        for role in ("prefill", "decode"):
            metrics.nodes.labels(role, "up").set(2)
        metrics.pools.set({"prefill": PoolState(2, 4, 2, 8, 10, 100), "decode": PoolState(2, 0, 6, 8, 30, 100)})
        for _ in range(number):
            metrics.ended("m", 1.0, None, "stop")
            metrics.first_token_s.labels("m").observe(0.5)
            metrics.prompt_tokens.labels("m").inc(100)
            metrics.timelines._of_model("m")["queue"].observe(0.4)
            metrics.timelines._hits.labels("m", "prefill_node").inc(25)
            metrics.inter_token_s.labels("m").observe(0.009, times=99)
            metrics.inter_token_s.labels("m").observe(0.09)
        pages.append(Page.parse(generate_latest(registry).decode()))
    return pages


def node_pages(role: NodeRole, on_gpu: bool = True) -> list[Page]:
    registry = new_registry(role.value)
    metrics = NodeMetrics(registry, "m")
    metrics.watch_slots(4, lambda: 3)
    pages = []
    for number in (1, 3):
        metrics.set_load(Load(num_waiting=1, num_running=2, num_blocks_free=6, num_blocks_total=8))
        seconds = {"device": 4.0 * number, "gap": 1.0 * number, "launch": 0.5 * number if on_gpu else 0.0}
        metrics.set_steps(seconds, {"prompt": 1 * number, "decode": 9 * number}, {"prompt": 512 * number})
        metrics.set_counts({"free": 1}, number)
        pages.append(Page.parse(generate_latest(registry).decode()))
    return pages


def test_figures_are_what_happened_between_two_pages():
    found = figures(
        [
            Window(router_pages(), 10.0),
            *(Window(node_pages(role), 10.0) for role in (NodeRole.DECODE, NodeRole.PREFILL)),
        ]
    )
    assert (found.seconds, found.num_requests, found.ttft_s, found.ttft_p90_s) == (10.0, 10, 0.5, 0.5)
    assert found.stages == {"queue": pytest.approx(0.4)}
    assert (found.itl_p50_s, found.itl_p99_s, found.hits) == (0.01, 0.01, 0.25)
    assert found.bottleneck == {"prefill": 1.0, "decode": 0.0, "none": 0.0}
    assert (found.prefill.num_nodes, found.prefill.waiting, found.prefill.kv_blocks, found.decode.seats) == (
        *(2, 4.0, 0.1),
        0.75,
    )
    decode = found.decode
    assert (decode.device, decode.gap, decode.tokens_per_step, decode.prompt_steps) == (0.8, 0.2, 512.0, 0.1)
    assert (decode.slots, decode.preemptions) == (0.25, None)  # no attempt ended


def test_what_a_router_keeps_until_a_decode_node_has_room_waits_for_one():
    registry = new_registry(ROUTER)
    metrics = RouterMetrics(registry)
    metrics.pools.set({"prefill": PoolState(1, 4), "decode": PoolState(1, 1, num_withheld=3)})
    metrics.set_requests({"queued": 5, "unplaced": 3})
    page = Page.parse(generate_latest(registry).decode())
    found = figures([Window([page, page])])
    assert (found.prefill.waiting, found.decode.waiting) == (4.0, 4.0)


def test_a_gauge_of_which_each_worker_has_a_part_is_added_up():
    head = "baton:build_info 1\n"
    two = Page.parse(
        head + 'baton:num_requests{worker="0",state="unplaced"} 3\nbaton:num_requests{worker="1",state="unplaced"} 2\n'
    )
    window = Window([two, Page.parse(head)])
    assert window.gauge_sum("baton:num_requests", state="unplaced") == 2.5


def test_one_page_stands_for_all_since_the_start():
    found = figures(windows([router_pages()[-1], node_pages(NodeRole.DECODE)[-1]]))
    assert (found.seconds, found.num_requests, found.decode.device) == (None, 10, None)
    assert found.decode.tokens_per_step == 512.0


def test_a_device_that_is_the_host_does_not_wait_for_it():
    found = figures([Window(router_pages(), 10.0), Window(node_pages(NodeRole.DECODE, on_gpu=False), 10.0)])
    assert found.decode.gap is None


def test_pages_are_told_apart_by_process_and_put_in_order():
    one, other = node_pages(NodeRole.DECODE), node_pages(NodeRole.DECODE)
    found = windows([one[1], other[0], other[1], one[0]])
    assert sorted(len(window.pages) for window in found) == [2, 2]


@pytest.mark.parametrize("text", ["<html>", "up 1\n", 'x{a="\n'])
def test_what_is_no_page_is_refused(text):
    with pytest.raises(ValueError, match="it is not"):
        Page.parse(text)


# ---- the command ----


def saved(tmp_path: Path) -> list[str]:
    registry = new_registry(ROUTER)
    metrics = RouterMetrics(registry)
    metrics.pools.set({"prefill": PoolState(1, 9, 1, 8, 10, 100), "decode": PoolState(1, 0, 6, 8, 30, 100)})
    metrics.nodes.labels("prefill", "up").set(1)
    metrics.ended("m", 1.0, None, "stop")
    (tmp_path / "router.txt").write_bytes(generate_latest(registry))
    return ["--metrics", str(tmp_path / "router.txt")]


def test_saved_pages_become_proposals(tmp_path, capsys):
    main.main(saved(tmp_path))
    out = capsys.readouterr().out
    assert "1 requests ended in the time of the pages" in out  # which one page has since the start, and two have not
    assert "prefill nodes: 2 instead of 1" in out
    main.main([*saved(tmp_path), "--json"])
    stated = json.loads(capsys.readouterr().out)
    assert stated["proposals"][0]["setting"] == "prefill nodes"
    assert stated["figures"]["bottleneck"]["prefill"] == 1.0


def test_without_a_request_nothing_is_proposed(capsys):
    report.print_report(Figures(), [], {"http://a": "gone"}, Console(width=100))
    out = capsys.readouterr().out
    assert "no request ended" in out
    assert "not read: http://a: gone" in out
    assert report.NOTHING in out


@pytest.mark.parametrize("content", [None, "garbage {", ""])
def test_what_cannot_be_read_ends_with_1(tmp_path, capsys, content):
    path = tmp_path / "page"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit) as ended:
        main.main(["--metrics", str(path)])
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith(f"baton tune: --metrics: {path}: ")


def test_pages_of_nodes_alone_are_not_enough(tmp_path, capsys):
    path = tmp_path / "node"
    path.write_bytes(generate_latest(new_registry("decode")))
    with pytest.raises(SystemExit):
        main.main(["--metrics", str(path)])
    assert "no page of a router" in capsys.readouterr().err


def test_processes_are_watched(monkeypatch):
    """A real page each for a router and a node, and a node that is gone."""
    router_registry, node_registry = new_registry(ROUTER), new_registry("decode")
    router, node = RouterMetrics(router_registry), NodeMetrics(node_registry, "m")
    local, gate = HostPort("127.0.0.1", 0), AdminGate()
    servers = [MetricsServer(local, registry, {}, {}, gate) for registry in (router_registry, node_registry)]
    gone = HostPort("127.0.0.1", 1)
    monkeypatch.setattr(sources, "NUM_LOOKS", 2)
    looks: list[float] = []

    def wait(_: float) -> None:
        router.ended("m", 1.0, None, "stop")
        node.set_steps({"device": float(len(looks))}, {"decode": 1}, {})

    settings = TuneSettings(url=f"http://{servers[0].address}", duration=0.1, node_metrics=(servers[1].address, gone))
    try:
        watched = sources.watch(settings, looks.append, wait)
    finally:
        for server in servers:
            server.close()
    assert [(window.role, len(window.pages)) for window in watched.windows] == [("router", 3), ("decode", 3)]
    assert list(watched.missing) == [f"http://{gone}/metrics"]
    found = figures(watched.windows)
    assert (found.num_requests, len(looks)) == (2, 3)


def watched(monkeypatch, starts: dict[str, list[int]]) -> sources.Watched:
    """Of pages whose processes began at those times, by address."""

    def page(url: str, _: object) -> str:
        role = "router" if "//r/" in url else "decode"
        return f'baton:build_info{{role="{role}"}} 1\nprocess_start_time_seconds {starts[url].pop(0)}\n'

    monkeypatch.setattr(sources, "NUM_LOOKS", 1)
    monkeypatch.setattr(sources, "fetch", page)
    settings = TuneSettings(url="http://r", duration=0.1, node_metrics=(HostPort("n", 1),))
    return sources.watch(settings, lambda _: None, lambda _: None)


def test_pages_of_two_processes_are_never_compared(monkeypatch):
    router, node = "http://r/metrics", "http://n:1/metrics"
    found = watched(monkeypatch, {router: [5, 5], node: [6, 7]})
    assert [window.role for window in found.windows] == ["router"]
    assert "another process" in found.missing[node]
    with pytest.raises(sources.Unreadable, match="--url: another process"):
        watched(monkeypatch, {router: [5, 6], node: [7, 7]})


def test_pages_of_several_routers_are_refused():
    with pytest.raises(ValueError, match="several routers"):
        figures([Window(router_pages()), Window(router_pages())])


def test_nodes_are_those_that_the_router_names(monkeypatch):
    nodes = [{"metrics_address": "10.0.0.1:10001", "state": "up"}, {"state": "connecting"}]
    monkeypatch.setattr(sources, "fetch", lambda *_: json.dumps({"nodes": nodes}))
    assert sources.named_nodes("http://r", {}) == [HostPort("10.0.0.1", 10001)]
    monkeypatch.setattr(sources, "fetch", lambda *_: "[]")
    with pytest.raises(sources.Unreadable, match="does not list nodes"):
        sources.named_nodes("http://r", {})


@pytest.mark.parametrize("url", ["ftp://a", "http://", "http://a:0", "a:1"])
def test_a_url_that_is_none(url, capsys):
    with pytest.raises(SystemExit) as ended:
        main.main(["--url", url])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("baton tune: --url: must be")
