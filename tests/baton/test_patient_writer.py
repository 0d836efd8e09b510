"""Lines to a pipe that nobody reads."""

import logging
import os
import select
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from baton.log_levels import LogLevels
from baton.process import patient_writer
from baton.process.patient_writer import PatientWriter
from baton.telemetry import configure_logging

ALL_BYTES = 2**20


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, TextIO]]:
    monkeypatch.setattr(patient_writer, "PATIENCE_S", 0.01)
    reading, writing = os.pipe()
    with open(writing, "w") as stream:  # noqa: PTH123  (a descriptor)
        yield reading, stream
    os.close(reading)


@pytest.fixture
def root_logger() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before
    logging.captureWarnings(False)


def test_what_nobody_reads_is_lost_and_what_was_broken_off_ends_its_line(pipe: tuple[int, TextIO]) -> None:
    reading, stream = pipe
    out = PatientWriter(stream)
    while out.write("a" * (select.PIPE_BUF - 1) + "\n"):
        pass
    os.read(reading, select.PIPE_BUF)
    assert not out.write("b" * select.PIPE_BUF + "c\n")
    assert not out.write("d\n")
    os.read(reading, ALL_BYTES)
    assert out.write("e\n")
    assert out.write("f\n")
    assert os.read(reading, ALL_BYTES) == b"\ne\nf\n"


@pytest.mark.usefixtures("root_logger")
def test_a_log_that_nobody_reads_says_later_how_much_is_missing(pipe: tuple[int, TextIO]) -> None:
    reading, stream = pipe
    configure_logging(LogLevels(), "n0", stream)
    log = logging.getLogger("test")
    for _ in range(100):
        log.info("x" * 2000)
    lines = os.read(reading, ALL_BYTES).splitlines()
    log.info("again")
    *_, lost, again = os.read(reading, ALL_BYTES).decode().splitlines()
    whole = sum(line.endswith(b"x" * 2000) for line in lines)
    assert lost.endswith(f"log lines lost={100 - whole}: nobody read them, or the disk was full")
    assert again.endswith("again")


def test_lines_for_which_the_disk_was_full_are_counted_too(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with open("/dev/full", "w") as stream, path.open("w") as file:  # noqa: PTH123  (a device)
        out = PatientWriter(stream)
        for line in ("a\n", "b\n"):
            out.write_or_count(line, "lost {}\n".format)
        os.dup2(file.fileno(), stream.fileno())
        out.write_or_count("c\n", "lost {}\n".format)
        out.write_or_count("d\n", "lost {}\n".format)
    assert path.read_text() == "lost 2\nc\nd\n"


def test_one_who_reads_in_time_gets_all(pipe: tuple[int, TextIO], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patient_writer, "PATIENCE_S", 60.0)
    reading, stream = pipe
    out = PatientWriter(stream)
    text = "x" * 3 * 2**16
    written = list[bool]()
    writer = threading.Thread(target=lambda: written.append(out.write(text)))
    writer.start()
    got = b""
    while len(got) < len(text):
        got += os.read(reading, ALL_BYTES)
    assert got == text.encode()
    writer.join()
    assert written == [True]
