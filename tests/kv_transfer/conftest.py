"""Rigs for tests of KV transfers."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from kv_transfer.transports.memory import MemoryHub
from tests.kv_transfer.deadlines import sooner_over
from tests.kv_transfer.mover_sides import Side, linked
from tests.kv_transfer.rig import KINDS, KINDS_CUDA, Host, Rig, rig_of

torch.set_num_threads(1)
multiprocessing.set_forkserver_preload(["tests.kv_transfer.rig"])  # torch is loaded once; UCX in each process anew


PROCESS_KINDS = [kind for kind in KINDS if kind not in ("memory", "ucx")]


def _on_gpus(kinds: Iterable[str]) -> list[Any]:
    return [pytest.param((kind, True), id=f"{kind}-cuda", marks=pytest.mark.gpu) for kind in kinds]


def _on_cpu(kinds: Iterable[str], full: tuple[str, ...] = ("ucx",)) -> list[Any]:
    """`ucx` chooses by itself, on a machine without GPUs the same as `ucx-tcp`."""
    return [pytest.param((kind, False), id=kind, marks=pytest.mark.full if kind in full else ()) for kind in kinds]


def _rig(kind: str, on_gpu: bool) -> AbstractContextManager[Rig]:
    if kind == "nixl":
        pytest.importorskip("nixl_cu13", reason="the extra [nixl] is not installed")
    if on_gpu and not torch.cuda.is_available():
        pytest.skip("no GPU")
    if kind == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("there is no second GPU, and NCCL needs one for each process")
    return rig_of(kind, on_gpu)


@pytest.fixture(params=_on_cpu(KINDS, full=("ucx", "ucx-shm")) + _on_gpus(KINDS_CUDA))
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Over each transport. `ucx-shm` is `ucx-tcp` with other wires, which `process_rig` has in CI too."""
    with _rig(*request.param) as rig:
        yield rig


@pytest.fixture(params=_on_cpu(PROCESS_KINDS) + _on_gpus(KINDS_CUDA))
def process_rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Over each way between processes; `ucx` by itself is one of the others."""
    with _rig(*request.param) as rig:
        yield rig


@pytest.fixture(params=_on_cpu(PROCESS_KINDS, full=("ucx-shm",)) + _on_gpus(["ucx-tcp"]))
def wire_rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Over each way between processes that is slow enough to be cut in mid-message; nobody gets `ucx-shm` unasked."""
    with _rig(*request.param) as rig:
        yield rig


@pytest.fixture(params=_on_cpu(PROCESS_KINDS, full=("ucx-shm", "nixl", "ordered")))
def rank_rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Over the transports of nodes of several ranks: each rank's is one of several in its process."""
    with _rig(*request.param) as rig:
        yield rig


@pytest.fixture(params=_on_cpu(["ipc"]) + _on_gpus(["ipc"]))
def ipc_rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Over what stores straight into the peer's slots."""
    with _rig(*request.param) as rig:
        yield rig


@pytest.fixture
def hub_pair() -> tuple[Side, Side]:
    """A sender and a receiver; the test has the hub deliver."""
    hub = MemoryHub()
    return linked(Side(hub, "sender", True), Side(hub, "receiver", False))


@pytest.fixture(scope="package", autouse=True)
def _sooner() -> Iterator[None]:
    """Of transports in this process. Those on GPUs are in others."""
    with sooner_over():
        yield


@pytest.fixture(scope="session", autouse=True)
def _hosts() -> Iterator[None]:
    yield
    Host.end_all()
