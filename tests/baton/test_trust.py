"""What the settings of trust between processes warn of."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from baton.rpc.trust import ClusterSettings


@pytest.mark.parametrize(
    ("mode", "owned", "warned"),
    [
        (0o600, True, False),
        (0o640, True, True),
        (0o644, True, True),
        (0o440, False, False),  # as Kubernetes gives it: root's, and readable for a group of the process
        (0o444, False, True),
    ],
)
def test_a_secret_that_more_may_read_than_must_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, owned: bool, warned: bool
) -> None:
    file = tmp_path / "secret"
    file.write_text("a-secret-of-many-bytes")
    settings = ClusterSettings(cluster_secret_file=file)
    file.chmod(mode)
    if not owned:
        monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
    told = any("may read" in warning for warning in settings.warnings(None))
    assert told == warned
