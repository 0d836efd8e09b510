"""The console's pictures: as small as they must be, and unchanged by being made smaller."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

from tools.screenshots import FOLDER, MAX_BYTES, _chunk, _squeeze

ROWS = b"\0" + bytes(range(30)) + b"\0" + bytes(30)
"""Of a picture of ten by two pixels, each behind its filter."""


def test_every_picture_of_the_docs_is_small() -> None:
    sizes = {path.name: path.stat().st_size for path in FOLDER.glob("*.png")}
    assert {"light.png", "dark.png", "narrow.png", "details.png"} <= sizes.keys()
    assert max(sizes.values()) <= MAX_BYTES, sizes


def test_a_squeezed_picture_has_the_same_pixels(tmp_path: Path) -> None:
    head = b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", struct.pack(">IIBBBBB", 10, 2, 8, 2, 0, 0, 0))
    data = zlib.compress(ROWS, 0)
    path = tmp_path / "picture.png"
    path.write_bytes(head + _chunk(b"IDAT", data[:20]) + _chunk(b"IDAT", data[20:]) + _chunk(b"IEND", b""))
    before = path.stat().st_size
    _squeeze(path)
    smaller = zlib.compress(ROWS, 9)
    assert path.read_bytes() == head + _chunk(b"IDAT", smaller) + _chunk(b"IEND", b"")
    assert path.stat().st_size < before
