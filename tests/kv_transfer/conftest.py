"""Rigs for tests of KV transfers."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest
import torch

from tests.kv_transfer.rig import KINDS, Host, Rig, rig_of

torch.set_num_threads(1)
multiprocessing.set_forkserver_preload(["tests.kv_transfer.rig"])  # torch is loaded once; UCX in each process anew


@pytest.fixture(params=KINDS)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Over each transport."""
    with rig_of(request.param) as rig:
        yield rig


@pytest.fixture(params=[kind for kind in KINDS if kind not in ("memory", "ucx")])
def wire_rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Over each way between processes; `ucx` by itself is one of the others."""
    with rig_of(request.param) as rig:
        yield rig


@pytest.fixture(scope="session", autouse=True)
def _hosts() -> Iterator[None]:
    yield
    Host.end_all()
