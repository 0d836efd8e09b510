"""Where a batch's new tokens lie: behind those that are there already, in the blocks of their own sequence."""

from __future__ import annotations

import torch

from baton_kernels.paged_attention import PagedBatch


def test_new_tokens_follow_those_that_are_there() -> None:
    tables = [[7, 3], [5, 9, 2], [4]]
    batch = PagedBatch.build(tables, [1, 3, 2], [6, 9, 2], 4, torch.device("cpu"))
    assert batch.positions().tolist() == [5, 6, 7, 8, 0, 1]
    assert batch.slot_mapping().tolist() == [3 * 4 + 1, 9 * 4 + 2, 9 * 4 + 3, 2 * 4, 4 * 4, 4 * 4 + 1]
    assert (batch.num_tokens, batch.num_decodes, batch.query_starts.tolist()) == (6, 1, [0, 1, 4, 6])
