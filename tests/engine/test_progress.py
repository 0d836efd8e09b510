"""Whoever waits for weights is told how far they are."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
import torch

from engine.model.load import parallel_read, progress
from engine.model.load.progress import Loaded, progress_logged

GIB = 1024**3


class Lines(logging.Handler):
    """`came` is set by the next line."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.came = threading.Semaphore(0)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.came.release()


@pytest.fixture
def lines():
    handler, level = Lines(), progress.log.level
    progress.log.addHandler(handler)
    progress.log.setLevel(logging.INFO)
    yield handler
    progress.log.removeHandler(handler)
    progress.log.setLevel(level)


def test_a_line_every_period_for_as_long_as_it_takes(lines: Lines) -> None:
    loaded = Loaded(8 * GIB)
    with progress_logged("org/model", loaded, period_s=0.01):
        assert lines.came.acquire(timeout=20)
        loaded.add(2 * GIB)
        seen = len(lines.lines)
        while not any("percent=25" in line for line in lines.lines[seen:]):
            assert lines.came.acquire(timeout=20)
    count = len(lines.lines)
    assert lines.lines[0].startswith("weights loading model=org/model gib=0.00 total_gib=8.00 percent=0 seconds=")
    assert lines.lines[-1].startswith("weights loading model=org/model gib=2.00 total_gib=8.00 percent=25 seconds=")
    assert "progress" not in {thread.name for thread in threading.enumerate()}
    assert len(lines.lines) == count


def test_what_takes_no_time_says_nothing(lines: Lines) -> None:
    with progress_logged("m"):
        pass
    assert lines.lines == []


def test_every_byte_that_is_read_counts(tmp_path: Path) -> None:
    size = 2 * parallel_read.SPAN_BYTES + 12
    file = tmp_path / "data"
    file.write_bytes(bytes(size))
    loaded = Loaded(size)
    target = torch.empty(size, dtype=torch.uint8)
    parallel_read.read_spans(list(parallel_read.cut_spans(file, 0, torch.uint8, target)), loaded.add)
    assert loaded.count == size
