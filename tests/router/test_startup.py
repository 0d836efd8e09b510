"""What a router starts with, from its settings: how many connections open files allow."""

import logging
from typing import Any

import pytest

from router import startup
from router.settings import RouterSettings
from router.startup import StartError, _max_connections

NODES: dict[str, Any] = {"decode": "127.0.0.1:1"}


@pytest.mark.parametrize(
    ("settings", "open_files", "connections", "flag"),
    [
        ({}, 2**20, 16_384, ""),
        ({}, 20_000, 9_872, ""),
        ({}, 1024, 384, "--max-num-requests wants 4096"),
        ({"max_num_requests": 100}, 1024, 384, ""),
        ({"max_connections": 500}, 1024, 384, "--max-connections wants 500"),
        ({"max_connections": 500}, 2048, 500, ""),
        ({"max_num_requests": 0}, 200, 1, ""),
    ],
)
def test_connections_are_what_open_files_allow(settings, open_files, connections, flag, caplog):
    with caplog.at_level(logging.WARNING):
        fields: dict[str, Any] = {**NODES, **settings}
        assert _max_connections(RouterSettings(**fields), open_files) == connections
    assert ("allows" in caplog.text) is bool(flag)
    assert flag in caplog.text


def test_with_too_few_open_files_it_does_not_start():
    with pytest.raises(StartError, match=r"^open files: a limit of 127 is too low, 128 are needed"):
        _max_connections(RouterSettings(**NODES), 127)


def test_with_too_few_threads_it_does_not_start(monkeypatch):
    monkeypatch.setattr(startup, "why_too_few_threads", lambda: "threads: no more than 3 can be started")
    with pytest.raises(StartError, match=r"^threads: no more than 3 can be started"):
        startup.make_edge(RouterSettings(**NODES))
