"""The benchmark of transfers runs, compares every byte, and counts what it says. Not how fast anything is."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import pytest

from benchmarks.kv_transfer import ends, transports
from benchmarks.kv_transfer.transports import QUICK_TOKENS, main


def test_a_quick_run_compares_bytes_and_ends_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--quick", "--device=cpu", "--num-tries=2", "--layer-groups=3", "--verify-transfers"])
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [x["num_tokens"] for x in line["transfers"]] == list(QUICK_TOKENS)
    assert [x["num_bytes"] for x in line["transfers"]] == [64 << 10, 7 * 64 << 10]
    assert line["transfers"][0]["num_parts"] == 3
    assert all(0 < x["best_ms"] <= x["median_ms"] for x in line["transfers"])


def test_wrong_bytes_are_told() -> None:
    settings = transports.TransferSettings(quick=True, device="cpu")
    options = transports._options(settings, "ucx", 8)
    server = ends.Server(dataclasses.replace(options, role="receiver"), link=None)  # type: ignore[arg-type]
    try:
        sent, landed = server._permutation(3, "sender"), server._permutation(3, "receiver")
        server.pool[landed] = server.source[sent]
        assert server.check(3) is None
        server.pool[landed[1], 77] ^= 1
        assert server.check(3) == f"block {sent[1]} did not come whole"
        server.pool[landed[1], 77] ^= 1
        server.pool[0, 0] = 1
        assert server.check(3) == "a block was written that was not sent"
    finally:
        server.close()


def test_each_size_is_compared_in_a_pool_without_the_one_before() -> None:
    asked: list[tuple[object, ...]] = []

    class Asked:
        def start(self, *what: object) -> Callable[[], float]:
            return lambda: 0.0

        def call(self, *what: object) -> str | None:
            asked.append(what)
            return "no" if what == ("check", 3) else None

    with pytest.raises(ends.TransferFailed, match="no"):
        transports._check((Asked(), Asked()), [7, 3, 1])  # type: ignore[arg-type]
    assert asked == [("clear",), ("check", 7), ("clear",), ("check", 3)]


def test_an_unknown_transport_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--transports=ucx,pigeon"])
    assert "--transports: 'pigeon' is none of" in capsys.readouterr().err
