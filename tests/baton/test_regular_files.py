"""Files that are no files."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.regular_files import read_regular
from baton.rpc.cluster_secret import read_secret
from baton.telemetry.admin import read_key


def test_a_file_is_read_through_links(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link") == b"text"


@pytest.mark.parametrize("read", [read_secret, read_key])
def test_what_has_no_end_is_refused(read: Callable[[Path], object], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ValueError, match=f"cannot read {path}: not a regular file"):
            read(path)
