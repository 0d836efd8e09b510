"""step_inputs and update_block_tables against plain Python."""

from __future__ import annotations

import pytest
import torch

from baton_kernels.step_inputs import reference, update_block_tables

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
IMPLEMENTATIONS = ["reference", "kernel"]


def implementation(name: str) -> object:
    if name == "reference":
        return reference
    from baton_kernels.step_inputs import kernel

    return kernel


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("block_size", [1, 12, 16])
@pytest.mark.parametrize("num_tokens", [0, 1, 150])
def test_ids_and_slots(num_tokens: int, block_size: int, name: str, device: str) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    num_rows, max_blocks = 7, 5
    tables = torch.randint(1, 1 << 28, (num_rows, max_blocks), generator=generator, dtype=torch.int32)
    last = torch.randint(0, 1 << 20, (num_rows,), generator=generator, dtype=torch.int32)
    rows = torch.randint(-1, num_rows, (num_tokens,), generator=generator, dtype=torch.int32)
    positions = torch.randint(0, max_blocks * block_size, (num_tokens,), generator=generator, dtype=torch.int32)
    host = torch.randint(-1, 2, (num_tokens,), generator=generator, dtype=torch.int32)
    ids, slots = [], []
    for row, position, token in zip(rows.tolist(), positions.tolist(), host.tolist(), strict=True):
        ids.append(0 if row < 0 else int(last[row]) if token < 0 else token)
        block = int(tables[row, position // block_size])
        slots.append(0 if row < 0 else block * block_size + position % block_size)
    out = [torch.full((num_tokens,), -7, dtype=torch.int64, device=device) for _ in range(2)]
    state = [t.to(device) for t in (rows, positions, host, last, tables)]
    implementation(name).step_inputs(*state, block_size, *out)  # type: ignore[attr-defined]
    assert [t.tolist() for t in out] == [ids, slots]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("n", [0, 1, 200])
def test_tables_change_where_told(n: int, dtype: torch.dtype, name: str, device: str) -> None:
    generator = torch.Generator().manual_seed(n)
    tables = torch.randint(0, 100, (9, 33), generator=generator, dtype=torch.int32)
    places = torch.randperm(tables.numel(), generator=generator)[:n]
    blocks = torch.arange(1000, 1000 + n, dtype=torch.int32)
    changed = tables.to(device)
    implementation(name).update_block_tables(changed, places.to(dtype).to(device), blocks.to(device))  # type: ignore[attr-defined]
    for place, block in zip(places.tolist(), blocks.tolist(), strict=True):
        tables[place // 33, place % 33] = block
    assert torch.equal(changed.cpu(), tables)


@pytest.mark.parametrize("device", DEVICES)
def test_update_of_the_public_function(device: str) -> None:
    tables = torch.zeros((2, 3), dtype=torch.int32, device=device)
    update_block_tables(
        tables, torch.tensor([4, 0], device=device), torch.tensor([5, 6], dtype=torch.int32, device=device)
    )
    assert tables.tolist() == [[6, 0, 0], [0, 5, 0]]
