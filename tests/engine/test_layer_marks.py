"""A step that ends a prompt to hand off says which of its layers are computed, and wakes whoever waits for one."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.messages import AttemptId
from baton.sampling import SamplingParams
from baton_kernels.event_thread import EventThread
from baton_kernels.kv_write import rope_kv_write
from engine.config import EngineConfig
from engine.model import attention, fast
from engine.model.layer_marks import LayerMarks
from engine.model.load import loader
from engine.model.load.checkpoint import Checkpoint
from engine.model.probe import probe
from engine.model.runner import TorchModelRunner, TorchStep
from engine.sequence import Sequence
from engine.step import Chunk
from tests.engine import tiny_models
from tests.engine.rank_threads import Load, ranked_runner

SIZES = EngineConfig(num_blocks=40, max_model_len=200, vocab_size=tiny_models.VOCAB_SIZE)
WAIT_S = 20.0
NUM_LAYERS = 2


def runner_of(folder: Path, device: str, wake: Callable[[], None]) -> TorchModelRunner:
    model = loader.load_model(
        Checkpoint.open(tiny_models.save(tiny_models.CONFIGS["llama"], folder)), "float32", device
    )
    probed = probe(model, SIZES.max_model_len)
    fast.apply(model, probed, SIZES.max_model_len)
    return TorchModelRunner(model, SIZES, probed, wake=wake, layer_groups=NUM_LAYERS)


def launch(runner: TorchModelRunner, hand_off: bool = True, end: int = 40) -> TorchStep:
    tokens = tuple(3 + i % 7 for i in range(40))
    seq = Sequence(AttemptId(1, "r", 0), [0], tokens, SamplingParams(temperature=0.0), hand_off=hand_off)
    seq.block_table = [1, 2, 3]
    step = runner.launch([Chunk.of(seq, 0, end)])
    runner.forget(seq)
    assert isinstance(step, TorchStep)
    return step


def test_on_a_cpu_all_is_computed_at_once(tmp_path: Path) -> None:
    step = launch(runner_of(tmp_path, "cpu", lambda: None))
    assert step.is_done()
    assert step.num_layers_done() == NUM_LAYERS


class Seen(LayerMarks):
    """What a step of rank 0 says, beside what rank 1 does."""

    def __init__(self) -> None:
        super().__init__(tuple(range(1, NUM_LAYERS + 1)))
        self.order = list[tuple[str, int]]()
        self.complete = [threading.Event() for _ in range(NUM_LAYERS)]

    def written(self, layer: int) -> None:
        self.order.append(("complete", layer))
        if layer >= 0:
            self.complete[layer].set()


def test_a_layer_is_complete_when_all_ranks_have_written_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 writes each layer late: after rank 0 has said that the layer is complete, if it does so at once."""
    seen = Seen()
    load = Load(tiny_models.save(tiny_models.CONFIGS["llama"], tmp_path), SIZES, fused=True)
    with ranked_runner(2, load) as (runner, ranks):
        monkeypatch.setattr(runner, "_marks", lambda chunks: seen)
        pool = ranks[1].pool.tensor.untyped_storage().data_ptr()
        write, layers = rope_kv_write, itertools.count()

        def write_late(*tensors: Any, **how: Any) -> None:
            if tensors[5].untyped_storage().data_ptr() != pool:
                write(*tensors, **how)
                return
            layer = next(layers)
            seen.complete[layer].wait(0.2)
            write(*tensors, **how)
            seen.order.append(("written", layer))

        monkeypatch.setattr(attention, "rope_kv_write", write_late)
        launch(runner)
    assert seen.order == [("complete", -1), ("written", 0), ("complete", 0), ("written", 1)]


class Broken:
    """An event of a device that has failed."""

    def synchronize(self) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_device_that_fails_wakes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sleeps until the step is done must learn that it never will be."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    woken = threading.Semaphore(0)
    watch = EventThread(torch.device("cuda"), "watch")
    for _ in range(2):
        watch.add(Broken(), woken.release)  # type: ignore[arg-type]
        assert woken.acquire(timeout=WAIT_S)


@pytest.mark.gpu
def test_a_layer_is_there_while_the_next_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    woken = threading.Semaphore(0)
    runner = runner_of(tmp_path, "cuda", woken.release)
    launch(runner).wait()
    for _ in range(NUM_LAYERS + 1):  # each group, and the end
        assert woken.acquire(timeout=WAIT_S)
    runner.pool.tensor.zero_()
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())

    def written_by_layer() -> list[float]:
        with torch.cuda.stream(beside):
            sums: list[float] = runner.pool.tensor[1:4].abs().sum(dim=(0, 2, 3, 4, 5)).cpu().tolist()
        return sums

    assert written_by_layer() == [0, 0]  # and what loads kernels and takes memory, which waits for the device, is done
    written = LayerMarks.written

    def written_slowly(marks: LayerMarks, layer: int) -> None:
        """The device rests for a second between the two layers."""
        written(marks, layer)
        if layer == 0:
            torch.cuda._sleep(2_000_000_000)

    monkeypatch.setattr(LayerMarks, "written", written_slowly)
    step = launch(runner)
    assert woken.acquire(timeout=WAIT_S)
    assert step.num_layers_done() == 1
    found = written_by_layer()
    assert not step.is_done()
    assert found[0] > 0
    assert found[1] == 0
    step.wait()
    assert step.num_layers_done() == NUM_LAYERS
    for _ in range(NUM_LAYERS):
        assert woken.acquire(timeout=WAIT_S)
    assert not woken.acquire(blocking=False)


@pytest.mark.gpu
@pytest.mark.parametrize(("hand_off", "end"), [(False, 40), (True, 32)])
def test_nobody_asks_for_layers_but_who_hands_a_prompt_over(hand_off: bool, end: int, tmp_path: Path) -> None:
    woken = threading.Semaphore(0)
    step = launch(runner_of(tmp_path, "cuda", woken.release), hand_off, end)
    step.wait()
    assert woken.acquire(timeout=WAIT_S)
    assert step.marks is None
    assert step.num_layers_done() == NUM_LAYERS
