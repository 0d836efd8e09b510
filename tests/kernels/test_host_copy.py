"""host_copy: to and from a device, every byte and no other."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch

from baton_kernels.host_copy import host_copy, kernel, reference
from engine.model.upload import download, upload, upload_to


@pytest.mark.parametrize("implementation", [reference, kernel])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64, torch.bfloat16])
@pytest.mark.parametrize("n", [0, 1, 700])
def test_a_slice_is_copied_and_nothing_beside_it(n: int, dtype: torch.dtype, implementation: ModuleType) -> None:
    source = torch.arange(n).to(dtype)
    target = torch.full((n + 8,), 3, dtype=dtype)
    implementation.host_copy(source, target[4 : n + 4])
    assert torch.equal(target[4 : n + 4], source)
    assert target[:4].tolist() + target[n + 4 :].tolist() == [3] * 8


@pytest.mark.gpu
def test_pinned_memory_is_read_and_written_in_place() -> None:
    source = torch.arange(5000, dtype=torch.int64).pin_memory()
    there = torch.empty(5000, dtype=torch.int64, device="cuda")
    back = torch.zeros(5000, dtype=torch.int64).pin_memory()
    host_copy(source, there)
    host_copy(there, back)
    torch.cuda.synchronize()
    assert torch.equal(back, source)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1000, 60_000, 100_000])  # many fit into the ring, few do, none does
def test_memory_of_an_upload_is_kept_until_the_device_has_read_it(n: int) -> None:
    device = torch.device("cuda")
    busy = torch.empty(64 << 20, device=device)
    static = torch.empty(n, dtype=torch.int32, device=device)
    sent, got = [], []
    for i in range(50):
        busy.normal_()  # the device falls behind
        array = np.full(n, i, dtype=np.int32)
        sent.append(upload(array, device))
        upload_to(static, array + 1)
        got.append(download(static))
    torch.cuda.synchronize()
    for i, (there, back) in enumerate(zip(sent, got, strict=True)):
        assert there.unique().tolist() == [i]
        assert back.unique().tolist() == [i + 1]
