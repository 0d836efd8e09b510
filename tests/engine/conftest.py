"""Fixtures of several files."""

from __future__ import annotations

import pytest


@pytest.fixture
def graphs_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA graphs are stand-ins."""
    from tests.engine import cpu_graphs  # imports transformers

    cpu_graphs.install(monkeypatch)
