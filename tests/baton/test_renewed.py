"""What is made of files again when others have taken their place."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from baton.renewed import Renewed


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    paths = tmp_path / "key", tmp_path / "certificate"
    for path in paths:
        path.write_text("1")
    return paths


def pair(key: Path, certificate: Path) -> list[str]:
    try:
        texts = [key.read_text(), certificate.read_text()]
    except OSError as error:
        raise ValueError(f"cannot read: {error.strerror}") from None
    if texts[0] != texts[1]:
        raise ValueError("no pair")
    return texts


def replace(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def test_files_that_are_replaced_one_after_another_count_when_all_are(files, caplog):
    caplog.set_level(logging.INFO)
    renewed = Renewed(files, lambda: pair(*files))
    first = renewed.current()
    assert renewed.current() is first == ["1", "1"]
    replace(files[0], "2")
    assert renewed.current() is renewed.current() is first
    assert [record.message for record in caplog.records] == ["no pair; what was read before stays in use"]
    replace(files[1], "2")
    second = renewed.current()
    assert renewed.current() is second == ["2", "2"]
    assert caplog.records[-1].message == f"read again after a change files={files[0]},{files[1]}"


def test_files_that_go_and_come_back(files):
    renewed = Renewed(files, lambda: pair(*files))
    for path in files:
        path.unlink()
    assert renewed.current() == ["1", "1"]
    for path in files:
        path.write_text("2")
    assert renewed.current() == ["2", "2"]


def test_what_changes_while_it_is_read_is_read_again(files):
    def read_slowly() -> str:
        text = files[0].read_text()
        replace(files[0], "2")
        return text

    renewed = Renewed(files, read_slowly)
    assert renewed.current() == "2"


def test_at_first_the_files_must_be_good(files):
    replace(files[0], "2")
    with pytest.raises(ValueError, match="no pair"):
        Renewed(files, lambda: pair(*files))
