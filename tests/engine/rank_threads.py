"""The ranks of one node as threads of this process, which meet and work as those of `node.ranks.ranks` do."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import torch
from transformers import PreTrainedModel

from baton.kv_groups import group_layers
from engine.config import EngineConfig
from engine.model import fast
from engine.model.fast import FusedReport
from engine.model.load import loader
from engine.model.load.checkpoint import Checkpoint
from engine.model.other_ranks import NO_OTHERS, OtherRanks, RemoteRanks, serve
from engine.model.parallel.data_parallel import NO_WAVES, ONE_NODE, DataParallel, Waves
from engine.model.parallel.eplb import Eplb
from engine.model.parallel.group import GlooRanks, RankGroup
from engine.model.parallel.part import RankPart
from engine.model.parallel.pipeline import ONE_STAGE, Pipeline
from engine.model.probe import Probe, probe
from engine.model.rank import RankModel
from engine.model.rank_step import Int32Array
from engine.model.runner import TorchModelRunner
from tests.engine.thread_ranks import Post, ThreadRanks

TIMEOUT_S = 60.0
Inbox = SimpleQueue[tuple[int, Int32Array]]


class Load:
    """What each rank does first, on its own thread. reports: of all ranks, in no order, if `fused`. config: with the
    windows of the model's KV groups, or with one that keeps everything. num_stages: among which the layers are
    divided. num_redundant_experts: see RankPart."""

    def __init__(
        self,
        folder: Path,
        config: EngineConfig,
        *,
        fused: bool,
        quantization: str | None = None,
        whole_experts: bool = False,
        num_redundant_experts: int | None = None,
        num_stages: int = 1,
    ) -> None:
        self._folder, self.config, self._fused, self._quantization = folder, config, fused, quantization
        self._experts, self.num_stages = (whole_experts, num_redundant_experts), num_stages
        self.reports: list[FusedReport] = []

    def __call__(self, pipeline: Pipeline, data: DataParallel | None = None) -> tuple[PreTrainedModel, Probe]:
        model = loader.load_model(
            Checkpoint.open(self._folder),
            quantization=self._quantization,
            part=RankPart(pipeline.peers, pipeline.stage, *self._experts, data),
        )
        probed = probe(model, self.config.max_model_len)
        if self._fused:
            self.reports.append(fast.apply(model, probed, self.config.max_model_len))
        if self.config.table_shape.has_windows:
            groups = group_layers(pipeline.kv_of_all(probed.kv))
            probed = dataclasses.replace(probed, groups=pipeline.stage.groups(groups))
        return model, probed


@contextlib.contextmanager
def in_threads(
    size: int, run: Callable[[RankGroup], None], over: Callable[[GlooRanks], RankGroup] = lambda group: group
) -> Iterator[RankGroup]:
    """The group as rank 0 sees it; `run` has the other ranks, a thread each. At the end all of them must have ended.
    over: makes of each rank's group the one that is used."""
    post = Post()

    def run_rank(rank: int) -> None:
        with contextlib.closing(ThreadRanks(post, rank, size, TIMEOUT_S)) as group:
            run(over(group))

    with ThreadPoolExecutor(max(1, size - 1)) as pool:
        others = [pool.submit(run_rank, rank) for rank in range(1, size)]
        try:
            with contextlib.closing(ThreadRanks(post, 0, size, TIMEOUT_S)) as group:
                yield over(group)
        finally:
            for other in others:
                other.result(TIMEOUT_S)


@dataclass
class Together:
    """What ranks of one node do beside that. join: meets the ranks of data parallel nodes, on each rank's thread. eplb:
    of rank 0's model."""

    join: Callable[[int], DataParallel | None] = lambda rank: None
    waves: Waves = NO_WAVES
    eplb: Callable[[PreTrainedModel], Eplb | None] = lambda model: None


def _other_rank(group: RankGroup, load: Load, data: DataParallel | None) -> RankModel:
    pipeline = Pipeline(group, load.num_stages)
    model, probed = load(pipeline, data)
    last_tokens = torch.zeros(load.config.max_num_seqs, dtype=torch.int32)
    return RankModel(model, load.config, probed, last_tokens, pipeline=pipeline, data=data or ONE_NODE)


@contextlib.contextmanager
def ranked_runner(
    size: int,
    load: Load,
    make: type[TorchModelRunner] = TorchModelRunner,
    *,
    before: Callable[[int], object] = lambda rank: None,
    wake: Callable[[], None] | None = None,
    together: Together | None = None,
    over: Callable[[GlooRanks], RankGroup] = lambda group: group,
) -> Iterator[tuple[TorchModelRunner, list[RankModel]]]:
    """The runner of rank 0, and the models of all `size` ranks. before: is called by each other rank, on its thread,
    when it has a message and has not done it. over: see `in_threads`."""
    together = together or Together()

    def rank_0(pipeline: Pipeline, others: OtherRanks) -> TorchModelRunner:
        data = together.join(0)
        model, probed = load(pipeline, data)
        place = {"pipeline": pipeline, "others": others, "data": data or ONE_NODE, "waves": together.waves}
        return make(model, load.config, probed, wake=wake, eplb=together.eplb(model), **place)  # type: ignore[arg-type]

    if size == 1:
        runner = rank_0(ONE_STAGE, NO_OTHERS)
        yield runner, [runner.rank]
        return
    inboxes: list[Inbox] = [SimpleQueue() for _ in range(1, size)]
    ranks: dict[int, RankModel] = {}

    def run(group: RankGroup) -> None:
        ranks[group.rank] = _other_rank(group, load, together.join(group.rank))
        group.minimum(0)  # all are there

        def receive() -> tuple[int, Int32Array]:
            message = inboxes[group.rank - 1].get()
            before(group.rank)
            return message

        serve(ranks[group.rank], receive)

    def send(kind: int, array: Int32Array) -> None:
        for inbox in inboxes:
            inbox.put((kind, array))

    with in_threads(size, run, over) as group:
        others = RemoteRanks(send)
        try:
            runner = rank_0(Pipeline(group, load.num_stages), others)
            group.minimum(0)
            yield runner, [runner.rank, *(ranks[rank] for rank in range(1, size))]
        finally:
            others.close()
