"""The Triton kernels of paged attention against float64: tiny and fp32 in the interpreter, bf16 and more on a GPU.

Every slot that no token is in holds NaN, so a wrong mask or a wrong block shows.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from baton_kernels.paged_attention import PagedBatch, contiguous, decode, kernel, merge, prefill, reference
from tests.kernels.attention_case import BATCHES, Case

torch.set_num_threads(1)

GPU = pytest.mark.gpu
DEVICES = [
    pytest.param("cpu", torch.float32, id="interpreter"),
    pytest.param("cuda", torch.float32, id="cuda-fp32", marks=GPU),
    pytest.param("cuda", torch.bfloat16, id="cuda-bf16", marks=GPU),
]
if torch.cuda.is_available():
    DEVICES = DEVICES[1:]
SMALL = {  # few enough tiles for the interpreter
    "decodes": [(1, 1), (1, 16), (1, 150), (1, 0), (1, 33)],
    "chunks": [(5, 5), (33, 33), (7, 60), (2, 33)],
    "mixed": [(1, 65), (1, 7), (40, 40), (1, 30), (9, 70)],
}


def check(case: Case, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None) -> None:
    """Through the dispatcher, on a GPU twice: the second layer uses the first one's plan."""
    exact = case.query.dtype == torch.float32
    expected = case.expected(0.3, window, softcap, sinks)
    real = torch.cat([torch.full((n,), context > 0) for n, context in case.lens])
    for _ in range(2 if case.query.is_cuda else 1):
        out = kernel.paged_attention(
            case.query, case.key_cache, case.value_cache, case.batch, 0.3, window, softcap, sinks, case.key, case.value
        )
        tolerance = 2e-5 if exact else 2e-2
        torch.testing.assert_close(out[real].double(), expected[real], atol=tolerance, rtol=tolerance)


HEADS = [(8, 2, 32), (6, 2, 80), (2, 2, 16)]


@pytest.mark.parametrize(
    ("kind", "heads", "kv_heads", "dim", "device", "dtype"),
    [
        pytest.param(kind, *heads, *place.values, marks=place.marks if i == j or place.marks else pytest.mark.full)
        for place in DEVICES
        for i, heads in enumerate(HEADS)
        for j, kind in enumerate(SMALL)
    ],
)
def test_plain(kind: str, heads: int, kv_heads: int, dim: int, device: str, dtype: torch.dtype) -> None:
    check(Case(SMALL[kind], heads, kv_heads, dim, device, 16, dtype))


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize("kind", SMALL)
def test_quantized_cache(kind: str, device: str, dtype: torch.dtype) -> None:
    check(Case(SMALL[kind], 3, 1, 48, device, 16, dtype, quantized=True))
    case = Case(SMALL[kind], 6, 2, 48, device, 16, dtype, quantized=True)
    check(case)
    if device != "cpu" or kind == "mixed":
        check(case, window=33, softcap=5.0, sinks=torch.linspace(-1, 1, 6, device=device))


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.full)])
def test_window_softcap_and_sinks(every: bool, kind: str, device: str, dtype: torch.dtype) -> None:
    case = Case(SMALL[kind], 4, 2, 16, device, 8, dtype)
    sinks = torch.linspace(-1, 1, 4, device=device)
    check(case, window=1)
    if every or device != "cpu":  # they take the interpreter seconds
        check(case, window=20)
        check(case, softcap=2.0, sinks=sinks)
    case.give_back(33)
    check(case, window=33, softcap=5.0, sinks=sinks)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@GPU
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size", "dtype"),
    [
        (32, 8, 128, 16, BF16),
        (32, 8, 128, 16, FP32),
        (28, 4, 128, 32, FP16),
        (8, 1, 256, 64, BF16),
        (4, 2, 256, 16, FP32),
        (6, 6, 64, 128, BF16),
        (12, 2, 96, 16, BF16),
        (40, 8, 80, 16, BF16),
        (71, 1, 64, 16, BF16),
    ],
)
def test_shapes_of_models(heads: int, kv_heads: int, dim: int, block_size: int, dtype: torch.dtype) -> None:
    sinks = torch.linspace(-1, 1, heads, device="cuda")
    for lens in (*BATCHES.values(), [(1, 5000), (1, 100), (600, 2600), (3, 4000)]):
        for quantized in (False, True):
            case = Case(sorted(lens), heads, kv_heads, dim, "cuda", block_size, dtype, quantized=quantized)
            check(case)
            case.give_back(70)
            check(case, window=70, softcap=5.0, sinks=sinks)


@GPU
@pytest.mark.parametrize("window", [None, 100])
def test_a_captured_graph_serves_other_contexts(window: int | None) -> None:
    heads, kv_heads, dim = 32, 8, 128
    case = Case([(1, 3000), (1, 700), (1, 17), (1, 1)], heads, kv_heads, dim, "cuda", 16, torch.bfloat16)
    batch = case.batch
    contexts, batch.host_context_lens = batch.context_lens.clone(), []

    def step() -> Tensor:
        return kernel.paged_attention(
            case.query, case.key_cache, case.value_cache, batch, 0.3, window, None, None, case.key, case.value
        )

    step()  # compiles; what it plans must not be in the graph
    batch.context_lens.fill_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for shorter in (0, 40, 2000, 1):
        lens = [(1, max(0, c - shorter)) for c in contexts.tolist()]
        batch.context_lens.copy_(torch.tensor([c for _, c in lens]))
        out.fill_(torch.nan)
        graph.replay()
        case.lens = lens
        keys, values = case.keys, case.values
        case.keys, case.values = ([x[:c] for x, (_, c) in zip(xs, lens, strict=True)] for xs in (keys, values))
        real = torch.tensor([c > 0 for _, c in lens])
        assert (out.double() - case.expected(0.3, window))[real].abs().max() < 2e-2
        case.keys, case.values = keys, values


def _plans(case: Case) -> list[tuple[Any, Any]]:
    return list(case.batch.plans.items())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_keys_split_over_programs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for few tokens on a GPU of many processors; one sequence in the middle has too few keys to be split."""
    monkeypatch.setattr(decode, "num_sms", lambda _: 10)
    monkeypatch.setattr(prefill, "num_sms", lambda _: 8)
    monkeypatch.setattr(prefill, "KEYS_PER_SPLIT", 32)
    sinks = torch.linspace(-1, 1, 4, device=device)
    case = Case([(1, 200), (1, 3), (1, 70), (4, 200), (7, 100)], 4, 1, 16, device, 16)
    check(case)
    check(case, window=90, sinks=sinks)
    assert all(plan.num_splits > 1 for key, plan in _plans(case) if key[0] == "prefill")


@example(contexts=[0, 1, 97], window=None, programs=6, beside_prompts=False)
@settings(max_examples=60, deadline=None)
@given(
    contexts=st.lists(st.integers(0, 400), min_size=1, max_size=40),
    window=st.none() | st.integers(1, 100),
    programs=st.integers(4, 60),
    beside_prompts=st.booleans(),
)
def test_shares_cover_each_context_once(
    contexts: list[int], window: int | None, programs: int, beside_prompts: bool
) -> None:
    batch = PagedBatch.build([[1]] * len(contexts), [1] * len(contexts), [1] * len(contexts), 16, torch.device("cpu"))
    batch.context_lens = torch.tensor(contexts, dtype=torch.int32)
    if beside_prompts:  # in a CUDA graph, where most of the places may be empty
        batch.num_tokens, batch.host_context_lens = len(contexts) + 8, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "tune", lambda *_: decode.Tuning(programs, 16, 1, 1))
        plan = decode._plan(batch, torch.empty(1, 4, 16), torch.empty(3, 2, 16, 16), window)
    wanted = programs // 2
    shares = [share for share in plan.shares.tolist() if share[0] >= 0]
    merges = [merge[:3] for merge in plan.merges.tolist() if merge[0] >= 0]
    longest = 0
    for seq, context in enumerate(contexts):
        own = [(place, *share) for place, share in enumerate(shares) if share[0] == seq]
        first, count = own[0][0], len(own)
        assert [place for place, *_ in own] == list(range(first, first + count))
        assert {share[-1] for share in own} == {count}
        assert (count > 1) == ([seq, first, count] in merges)
        visible_from = 0 if window is None else max(0, context - window)
        assert own[0][2] == visible_from // 16 * 16
        assert own[-1][3] == context
        for (*_, end, _), (_, _, start, *_) in itertools.pairwise(own):
            assert end == start
            assert end % 16 == 0
        longest = max(longest, *(-(-(end - start) // 16) for _, _, start, end, _ in own))
    assert len(shares) <= plan.shares.shape[0]
    assert len(merges) == sum(count > 1 for count in Counter(seq for seq, *_ in shares).values())
    tiles = sum(-(-share[2] // 16) - share[1] // 16 for share in shares)
    most = min(wanted + contexts.count(0), plan.shares.shape[0])  # empty places do not count if there is room
    if len(contexts) < most:
        assert len(shares) <= most
    else:
        assert longest <= max(1, -(-tiles // wanted))


def test_empty_places_beside_prompts_leave_the_shares_to_the_others() -> None:
    def longest(contexts: list[int]) -> int:
        batch = PagedBatch.build(
            [[1]] * len(contexts), [1] * len(contexts), [1] * len(contexts), 16, torch.device("cpu")
        )
        batch.context_lens, batch.host_context_lens = torch.tensor(contexts, dtype=torch.int32), []
        batch.num_tokens += 8
        plan = decode._plan(batch, torch.empty(1, 4, 16), torch.empty(3, 2, 16, 16), None)
        return max(end - start for seq, start, end, _ in plan.shares.tolist() if seq >= 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "num_sms", lambda _: 20)
        assert longest([3000, 900] + [0] * 30) == longest([3000, 900]) < 200


@pytest.mark.parametrize(
    ("num_seqs", "bound", "merged_at_once"), [(4, True, 4), (30, False, 4), (30, True, 2), (90, False, 2)]
)
def test_heads_are_merged_at_once_where_most_sequences_are_split(
    num_seqs: int, bound: bool, merged_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "num_sms", lambda _: 60)
    ones = [1] * num_seqs
    batch = PagedBatch.build([[1]] * num_seqs, ones, ones, 16, torch.device("cpu"))
    if bound:
        batch.host_context_lens = []
        batch.num_tokens += 8
    plan = decode._plan(batch, torch.empty(1, 4, 16), torch.empty(3, 2, 16, 16), None)
    assert plan.tuning.num_programs == 180
    assert plan.merged_at_once == merged_at_once


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_bounds_for_lengths(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a CUDA graph of short prompts: the host knows neither the lengths nor the contexts."""
    monkeypatch.setattr(prefill, "num_sms", lambda _: 16)
    monkeypatch.setattr(prefill, "KEYS_PER_SPLIT", 64)
    case = Case([(9, 110), (3, 3), (0, 0), (0, 0)], 4, 1, 16, device, 16)
    case.batch.query_lens, case.batch.host_context_lens = [12] * 4, []
    for window in (None, 70):
        check(case, window=window)
    assert all(plan.num_splits > 1 for plan in case.batch.plans.values() if isinstance(plan, prefill.Plan))


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize(
    ("query_len", "context"),
    [(32, 32), (21, 21), (16, 64), (32, 101), (19, 60), (3, 35)],
    ids=str,
)
def test_long_chunk_in_small(query_len: int, context: int, fresh: bool, quantized: bool) -> None:
    """Squares and rectangles with torch in cuDNN's place."""
    shapes = contiguous.Shapes(square=16, rows=8, few=20, widths=(48, 16))
    case = Case([(query_len, context)], 4, 2, 16, "cpu", 8, quantized=quantized)
    key, value = (case.key, case.value) if fresh else (None, None)
    out = contiguous.contiguous_attention(
        case.query, key, value, case.key_cache, case.value_cache, case.batch, 0, 0.3, shapes
    )
    torch.testing.assert_close(out, case.expected(0.3).float(), atol=2e-5, rtol=2e-5)


def test_equal_squares_go_together() -> None:
    square = contiguous.SHAPES.square
    lens = [(1, 9), *[(square, square)] * 7, (3, 3), (square, square), (square, 4 * square), (2 * square, 2 * square)]
    query_lens, context_lens = map(list, zip(*lens, strict=True))
    batch = PagedBatch.build([[1] * 512] * len(lens), query_lens, context_lens, 16, torch.device("cpu"))
    long, runs = kernel._ways(batch, can_be_contiguous=True, fused=True)
    assert [(seqs.start, len(seqs)) for seqs, _ in long] == [(1, 4), (5, 2), (7, 1), (9, 1), (10, 1), (11, 1)]
    assert runs == [range(8, 9)]
    for seqs, tokens in long:
        assert tokens.start == sum(n for n, _ in lens[: seqs.start])
        assert tokens.stop == sum(n for n, _ in lens[: seqs.stop])
    alone, _ = kernel._ways(batch, can_be_contiguous=True, fused=False)
    assert all(len(seqs) == 1 for seqs, _ in alone)


@GPU
def test_equal_squares() -> None:
    square = contiguous.SHAPES.square
    case = Case([(1, 30), *[(square, square)] * 7, (9, 50)], 4, 2, 128, "cuda", 16, torch.bfloat16)
    check(case)
    (plan,) = (plan for key, plan in _plans(case) if key[0] == "ways")
    assert [len(seqs) for seqs, _ in plan[0]] == [4, 2, 1]


@GPU
def test_long_chunks() -> None:
    """Among other sequences; the path of some is cuDNN's."""
    for lens in ([(4096, 4096)], [(2048, 8192)], [(1, 77), (4300, 4400), (9, 50), (1100, 13000), (5, 5)]):
        assert any(contiguous.pays(*chunk) for chunk in lens)
        for heads, kv_heads, dim in ((4, 2, 128), (3, 1, 64)):
            for quantized in (False, True):
                check(Case(lens, heads, kv_heads, dim, "cuda", 16, torch.bfloat16, quantized=quantized))


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_merge_pair(device: str, dtype: torch.dtype) -> None:
    out, other = (torch.randn(5, n, 48, device=device).to(dtype).transpose(0, 1) for n in (12, 9))
    lse, other_lse = (torch.randn(5, 16, device=device)[:, :n] * 30 for n in (12, 9))
    expected, expected_lse = out.clone(), lse.clone()
    reference.merge_pair(expected, expected_lse, other, other_lse, 2, 7)
    merge.merge_pair(out, lse, other, other_lse, 2, 7)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)
