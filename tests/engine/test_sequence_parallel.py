"""Rows of long steps that are divided among ranks: the model's logits are the same, however they are divided."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention

from baton_kernels.cuda_driver import CudaError
from baton_kernels.reduce_rms_norm import Parts, reference
from engine.model import fast
from engine.model.fast import FusedReport
from engine.model.fast.forwards import logits_as_served
from engine.model.fast.target import Target
from engine.model.load import loader
from engine.model.load.checkpoint import Checkpoint
from engine.model.parallel import gpus, sequence_parallel
from engine.model.parallel.group import RankGroup
from engine.model.parallel.part import RankPart
from engine.model.parallel.sequence_parallel import Copy, RowMemory, SequenceParallel
from engine.model.probe import probe
from tests.engine import tiny_models
from tests.engine.rank_threads import in_threads
from tests.engine.shared_rows import Counted, DividedRows, InOrder, memory
from tests.engine.test_sums import Clamped
from tests.engine.turns import CopiesInTurn, Turns

torch.set_num_threads(1)

MAX_MODEL_LEN = 64
CONFIGS = {**tiny_models.CONFIGS, **tiny_models.MIXTURES}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_parallel, "TILE_ROWS", 2)


def served(
    folder: Path, size: int, mutate: Any = lambda model: None, quantization: str | None = None
) -> tuple[Tensor, Tensor, FusedReport, int]:
    """Of rank 0: logits before and after the fusion, its report, and how many steps were divided."""
    found: dict[int, tuple[Tensor, Tensor, FusedReport, int]] = {}
    shared: dict[int, RowMemory] = {}

    def run(group: RankGroup) -> None:
        rows = DividedRows(group, shared)
        model: PreTrainedModel = loader.load_model(
            Checkpoint.open(folder), quantization=quantization, part=RankPart(rows)
        )
        mutate(model)
        probed = probe(model, MAX_MODEL_LEN)
        target = Target(model, probed.layers, MAX_MODEL_LEN)
        with torch.inference_mode():
            own = logits_as_served(target, probed.kv)
            report = fast.apply(model, probed, MAX_MODEL_LEN)
            before = rows.num_steps
            after = logits_as_served(target, probed.kv)
        found[group.rank] = own, after, report, rows.num_steps - before

    with in_threads(size, run) as group:
        run(group)
    assert all(torch.equal(found[0][1], found[rank][1]) for rank in range(size))
    assert found[0][2].taken_back is None
    return found[0]


@pytest.mark.parametrize(
    ("family", "size"), [("llama", 2), ("gemma2", 2), ("llama", 4), ("qwen3_moe", 2), ("gpt_oss", 2), ("qwen3_moe", 4)]
)
def test_logits_are_those_of_undivided_rows(family: str, size: int, tmp_path: Path) -> None:
    """Also where a norm comes before the residual, and of experts. The prompt is divided, the token after it is not."""
    own, after, report, num_steps = served(tiny_models.save(CONFIGS[family], tmp_path), size)
    assert "sequence_parallel 2/2" in str(report)
    assert num_steps == 1
    torch.testing.assert_close(after, own, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("quantization", ["fp8", "int8"])
def test_quantized_weights(quantization: str, tmp_path: Path) -> None:
    folder = tiny_models.save(CONFIGS["llama"], tmp_path)
    own, after, report, num_steps = served(folder, 2, quantization=quantization)
    assert "sequence_parallel 2/2" in str(report)
    assert num_steps == 1
    torch.testing.assert_close(after, own, atol=1e-4, rtol=1e-4)


def test_experts_compute_all_rows_at_once(tmp_path: Path) -> None:
    seen: list[int] = []

    def mutate(model: Any) -> None:
        experts = model.model.layers[1].mlp.experts
        experts.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))

    _, _, _, num_steps = served(tiny_models.save(CONFIGS["qwen3_moe"], tmp_path), 2, mutate)
    assert num_steps == 1
    assert seen[-4:] == [7, 7, 1, 1] or seen[-4:] == [7, 1, 7, 1], "of two ranks, which have seven rows and then one"


class Copying(LlamaAttention):
    """Reads its input by itself, before q, k and v."""

    def forward(self, hidden_states: Tensor, *given: Any, **named: Any) -> Any:
        return super().forward(hidden_states * 1.0, *given, **named)


def test_an_attention_that_reads_its_input_gets_it_whole(tmp_path: Path) -> None:
    def mutate(model: Any) -> None:
        model.model.layers[1].self_attn.__class__ = Copying

    own, after, report, num_steps = served(tiny_models.save(CONFIGS["llama"], tmp_path), 2, mutate)
    assert "sequence_parallel 2/2" in str(report)
    assert num_steps == 1
    torch.testing.assert_close(after, own, atol=1e-4, rtol=1e-4)


def test_rows_stay_together_if_a_sum_does(tmp_path: Path) -> None:
    """That no norm makes, because the MLP does more with it."""

    def mutate(model: Any) -> None:
        first = model.model.layers[0]
        first.mlp = Clamped(first.mlp)

    own, after, report, num_steps = served(tiny_models.save(CONFIGS["llama"], tmp_path), 2, mutate)
    assert report.pieces["sequence_parallel"].found == 0
    assert num_steps == 0
    torch.testing.assert_close(after, own, atol=1e-4, rtol=1e-4)


def test_rows_stay_together_if_one_rank_cannot_share_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share = DividedRows.share_rows

    def fail(group: DividedRows, width: int, dtype: torch.dtype) -> SequenceParallel:
        rows = share(group, width, dtype)
        if group.rank:
            raise CudaError("there is no driver")
        return rows

    monkeypatch.setattr(DividedRows, "share_rows", fail)
    own, after, report, num_steps = served(tiny_models.save(CONFIGS["llama"], tmp_path), 2)
    assert report.pieces["sequence_parallel"].found == 0
    assert num_steps == 0
    torch.testing.assert_close(after, own, atol=1e-4, rtol=1e-4)


def test_no_rank_waits_for_one_that_has_no_room_for_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the rendezvous they would, until torch gives up."""
    own = threading.local()

    def empty(num_values: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if own.rank == 1:
            raise torch.OutOfMemoryError("no room")
        return torch.empty(num_values, dtype=dtype, device=device)

    def rendezvous(memory: Tensor, name: str) -> None:
        raise AssertionError("rank 1 does not come")

    def share(group: RankGroup) -> None:
        own.rank = group.rank
        peers = object.__new__(gpus.GpuPeers)  # without NCCL
        vars(peers).update(vars(group), _host=group, peers=object(), _has_stages=False, _rows=None, _name="gpus")
        with pytest.raises(RuntimeError, match="no room"):
            peers.share_rows(8, torch.float32)

    monkeypatch.setattr(symmetric_memory, "empty", empty)
    monkeypatch.setattr(symmetric_memory, "rendezvous", rendezvous)
    with in_threads(3, share) as group:
        share(group)


def test_a_step_that_failed_does_not_divide_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one has one token: its sums are made as ever."""

    def end(rows: SequenceParallel) -> Tensor:
        found = SequenceParallel.end(rows)
        rows.active = True
        return found

    monkeypatch.setattr(Counted, "end", end)
    own, after, _, _ = served(tiny_models.save(CONFIGS["llama"], tmp_path), 2)
    torch.testing.assert_close(after, own, atol=1e-4, rtol=1e-4)


class Sums:
    """One rank's steps. A part has values that only its rank, its sum and its rows determine."""

    WIDTH = 2

    def __init__(self, rank: int, memories: list[RowMemory], turns: Turns, most_pieces: int) -> None:
        self._rank, self._size, self._turns, self._number = rank, len(memories), turns, 0
        self.rows = SequenceParallel(rank, memories, CopiesInTurn(turns, rank), min_own_rows=1, piece_rows=(2, 2))
        self.rows.most_pieces = most_pieces

    def step(self, num_rows: int, num_layers: int, lazy: bool) -> None:
        """lazy: attention takes the pieces of its input one by one."""
        rows = self.rows
        rows.begin(num_rows)
        for layer in range(num_layers):
            if layer:
                for index in range(len(rows.pieces)) if lazy else ():
                    self._take(index, self._number)
                if not lazy:
                    self._check(rows.take_all()[0], slice(0, num_rows), self._number)
            attention = self._next()
            parts = [self._send(index, attention) for index in range(len(rows.pieces))]
            mlp = self._next()
            for index, part in enumerate(parts):
                self._take(index, attention)
                part.fill_(torch.nan)  # its memory is used again
                self._send(index, mlp)
        self._check(rows.end()[0], slice(0, num_rows), self._number)
        assert not rows.active

    def _next(self) -> int:
        self._number += 1
        self.rows.then(partial(self._norm, self._number))
        return self._number

    def _send(self, index: int, number: int) -> Tensor:
        part = self._part(self._rank, number, self.rows.pieces[index])
        self.rows.send(index, part)
        return part

    def _take(self, index: int, number: int) -> None:
        self._check(self.rows.take(index)[0], self.rows.pieces[index], number)

    def _norm(self, number: int, parts: Parts, own: slice, out: Tensor) -> None:
        assert own.start < own.stop, "whose parts would it wait for?"
        reference.until_set(parts.arrived)
        ranks = [(self._rank + away) % self._size for away in range(self._size)]
        for rank, part in zip(ranks, [parts.own, *parts.received], strict=True):
            assert torch.equal(part, self._part(rank, number, own))
        out.copy_(parts.own + parts.received.sum(0))

    def _check(self, found: Tensor, rows: slice, number: int) -> None:
        expected = sum((self._part(rank, number, rows) for rank in range(self._size)), torch.zeros(()))
        assert torch.equal(found, expected)

    def _part(self, rank: int, number: int, rows: slice) -> Tensor:
        row = torch.arange(rows.start, rows.stop)
        return ((row * 31 + rank * 17 + number * 7) % 97).float()[:, None].expand(-1, self.WIDTH).contiguous()


STEPS = st.tuples(st.integers(4, 24), st.integers(1, 3), st.booleans())


@given(
    seed=st.integers(0, 2**32),
    size=st.integers(2, 4),
    most_pieces=st.integers(1, 4),
    steps=st.lists(STEPS, min_size=1, max_size=3),
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_row_or_flag_is_overwritten_too_early(
    monkeypatch: pytest.MonkeyPatch, seed: int, size: int, most_pieces: int, steps: list[tuple[int, int, bool]]
) -> None:
    """In whatever order ranks compute and copy engines copy: all get the sums, and none waits for ever."""
    turns = Turns(size, seed)

    def until_set(*flags: Tensor) -> None:
        turns.pause(lambda: all(bool(flag.all()) for flag in flags))
        turns.pause()  # before the flags are cleared

    monkeypatch.setattr(reference, "until_set", until_set)
    memories = [memory(size, 24, Sums.WIDTH) for _ in range(size)]

    def program(rank: int) -> None:
        sums = Sums(rank, memories, turns, most_pieces)
        for num_rows, num_layers, lazy in steps:
            sums.step(num_rows, num_layers, lazy)

    turns.run(program)
    assert not any(bool(own.flags.any()) for own in memories)


class Recorded(InOrder):
    """For one rank of two: the other's parts and rows have always come."""

    def __init__(self, own: RowMemory, events: list[str]) -> None:
        self._own, self._events = own, events

    def start(self, copies: Iterable[Copy]) -> None:
        self._own.flags.fill_(1)

    def join(self) -> None:
        self._events.append("join")


def test_rows_travel_while_others_are_computed() -> None:
    """Parts while the next piece is, and normed rows too; a step ends, or a CUDA graph may, when no rows travel."""
    memories, events = [memory(2, 16, 4) for _ in range(2)], list[str]()
    rows = SequenceParallel(0, memories, Recorded(memories[0], events), min_own_rows=1, piece_rows=(2, 2))
    rows.most_pieces = 4

    def norm(name: str, parts: Parts, own: slice, out: Tensor) -> None:
        events.append(f"norm {name}{own.start // 4}")

    rows.begin(14)
    for name in ("a", "b"):
        rows.then(partial(norm, name))
        for index, piece in enumerate(rows.pieces):
            if name == "b":
                rows.take(index)
            events.append(f"send {name}{index}")
            rows.send(index, torch.zeros(piece.stop - piece.start, 4))
    rows.end()
    assert [piece.stop - piece.start for piece in rows.pieces] == [4, 4, 4, 2]
    assert events == [
        *("send a0", "send a1", "norm a0", "send a2", "norm a1", "send a3", "norm a2"),
        *("send b0", "send b1", "norm b0", "norm a3", "send b2", "norm b1", "send b3", "norm b2", "norm b3", "join"),
    ]


@pytest.mark.parametrize(
    ("num_rows", "size", "captured", "lengths"),
    [
        (8192, 2, False, [4096, 4096]),
        (2049, 2, False, [1152, 897]),
        (4098, 4, False, [2176, 1922]),
        (8192, 4, False, [2048] * 4),
        (2048, 2, True, [1024, 1024]),
        (2048, 4, True, [768, 768, 512]),
        (1024, 2, True, [512, 512]),
    ],
)
def test_pieces_are_whole_tiles(
    num_rows: int, size: int, captured: bool, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the last one. A CUDA graph may have more of them than a host could launch."""
    monkeypatch.undo()
    monkeypatch.setattr(InOrder, "is_captured", captured)
    memories = [memory(size, num_rows, 1) for _ in range(size)]
    rows = SequenceParallel(0, memories, InOrder())
    assert rows.takes(num_rows) == captured, "there is too little work for a host that launches each piece"
    rows.launched_bytes = 4 * num_rows
    assert rows.takes(num_rows)
    assert not rows.takes(size * sequence_parallel.MIN_OWN_ROWS - 1)
    assert not rows.takes(num_rows + 1)
    rows.begin(num_rows)
    assert [piece.stop - piece.start for piece in rows.pieces] == lengths


def test_a_short_rest_is_part_of_the_last_piece() -> None:
    memories = [memory(4, 32, 1) for _ in range(4)]
    rows = SequenceParallel(0, memories, InOrder(), min_own_rows=1, piece_rows=(2, 2))
    rows.launched_bytes = 0
    assert rows.takes(4)
    assert not rows.takes(3)
    for num_rows, lengths in ((9, [4, 5]), (8, [4, 4]), (7, [7]), (4, [4])):
        rows.most_pieces = 4
        rows.begin(num_rows)
        assert [piece.stop - piece.start for piece in rows.pieces] == lengths
