"""block_checksum: the sum as written down, and whatever happens to a word shows."""

from __future__ import annotations

import pytest
import torch

from baton_kernels.block_checksum import block_checksums
from baton_kernels.block_checksum.reference import MIX, STEP

torch.set_num_threads(1)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MASK = (1 << 64) - 1


def by_hand(row: bytes) -> int:
    """In Python's integers, which have no size."""
    total = 0
    for place in range(len(row) // 8):
        word = int.from_bytes(row[place * 8 : place * 8 + 8], "little")
        x = word ^ ((place + 1) * STEP & MASK)
        x = (x ^ (x >> 30)) * (MIX & MASK) & MASK
        total += x ^ (x >> 27)
    total &= MASK
    return total - (1 << 64) if total >> 63 else total


def rows_of(num_rows: int, row_bytes: int, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, 256, (num_rows, row_bytes), generator=generator, dtype=torch.uint8).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("row_bytes", [8, 56, 4096, 8 * 4096 + 8, 8 * 3 * 4096])
def test_it_is_the_sum_of_mixed_words(row_bytes: int, device: str) -> None:
    rows = rows_of(4, row_bytes, device)
    assert block_checksums(rows).tolist() == [by_hand(bytes(row.tolist())) for row in rows.cpu()]


@pytest.mark.parametrize("device", DEVICES)
def test_of_some_layers_of_some_blocks(device: str) -> None:
    pool = rows_of(6, 96 * 8, device)
    part = pool[:, 32 * 8 : 64 * 8]
    wanted = [by_hand(bytes(part[block].tolist())) for block in (4, 1, 5)]
    assert block_checksums(part, [4, 1, 5]).tolist() == wanted


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("row_bytes", [8, 8 * 4096 + 8, 8 * 3 * 4096])
def test_the_kernel_says_the_same(row_bytes: int, device: str) -> None:
    from baton_kernels.block_checksum import kernel, reference

    rows = rows_of(5, 2 * row_bytes, device)[:, row_bytes:]
    ids = torch.tensor([3, 0, 3], device=device)
    assert torch.equal(kernel.block_checksums(rows, ids), reference.block_checksums(rows, ids))
    assert torch.equal(kernel.block_checksums(rows, None), reference.block_checksums(rows, None))


def test_each_bit_and_each_place_counts() -> None:
    row = rows_of(1, 64)
    seen = {int(block_checksums(row))}
    changed = [row.clone() for _ in range(64 * 8)]
    for bit, one_bit_off in enumerate(changed):
        one_bit_off[0, bit // 8] ^= 1 << bit % 8
    words = row.view(torch.int64)
    for one in range(8):
        for other in range(one):
            swapped = words.clone()
            swapped[0, [one, other]] = words[0, [other, one]]
            changed.append(swapped.view(torch.uint8))
    changed.append(torch.zeros_like(row))
    seen.update(int(block_checksums(other)) for other in changed)
    assert len(seen) == 1 + len(changed)
