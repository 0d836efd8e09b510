"""Calls of CUDA's driver."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from baton_kernels.cuda_driver import CudaDriver, CudaError, driver


def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", load)
    with pytest.raises(CudaError, match=r"driver cannot be loaded: libcuda\.so\.1: cannot open"):
        CudaDriver()


@pytest.mark.gpu
def test_a_copy_waits_for_what_an_event_recorded() -> None:
    first: Any = torch.cuda.Stream()
    second: Any = torch.cuda.Stream()
    event: Any = torch.cuda.Event()
    event.record(first)
    source, target = torch.zeros(1024, device="cuda"), torch.zeros(1024, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        torch.cuda._sleep(50_000_000)
        source.fill_(1)
    driver().record(event.cuda_event, first.cuda_stream)
    driver().wait(second.cuda_stream, event.cuda_event)
    driver().copy(target.data_ptr(), source.data_ptr(), source.nbytes, second.cuda_stream)
    assert not second.query()
    second.synchronize()
    assert bool((target == 1).all())


@pytest.mark.gpu
def test_an_error_is_named() -> None:
    torch.zeros(1, device="cuda")  # makes a context
    with pytest.raises(CudaError, match=r"^cuIpcCloseMemHandle: CUDA_ERROR_"):
        driver().close_handle(8)
