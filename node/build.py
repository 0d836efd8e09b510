"""From settings to an engine with its model and pool, and the node's description of them.

meet the other nodes and ranks -> tokenizer, this rank's part (`node.ranks.part`) -> runner -> engine -> warm-up
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import baton
from baton.layout import KvLayout
from baton.node_info import GenerationDefaults
from baton.telemetry import ExpertReadings
from engine.checkpoint import EMBEDDED, has_tokenizer
from engine.config import EngineConfig
from engine.engine import Engine
from engine.model import fast
from engine.model.expert_counts import ExpertCounts
from engine.model.graphs import decode_capture_sizes
from engine.model.load.checkpoint import Checkpoint
from engine.model.memory import out_of_memory
from engine.model.other_ranks import NO_OTHERS
from engine.model.parallel.data_parallel import NO_WAVES, ONE_NODE
from engine.model.parallel.eplb import Eplb
from engine.model.parallel.expert_slots import expert_slots
from engine.model.parallel.group import ONE_RANK
from engine.model.parallel.pipeline import ONE_STAGE, Pipeline
from engine.model.runner import TorchModelRunner
from kv_transfer.remote import RemotePool
from node.errors import StartupError
from node.peers.data_parallel import join_nodes, join_ranks
from node.peers.nodes import PeerNodes
from node.ranks.kv_layout import fingerprint_of, layout_of
from node.ranks.part import Part, device_of, dtype_of, load_part
from node.ranks.ranks import Ranks
from node.settings import NodeSettings
from node.tokenizer import TokenizerFiles, read_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel  # imported after engine.model, which makes this import faster

log = logging.getLogger(__name__)

_POOL_ADVICE = (
    "--gpu-memory-utilization, --kv-cache-memory-bytes, --num-gpu-blocks-override, --max-num-seqs: lower what was set, "
    "the KV pool and its tables do not fit"
)
_NOTICED_S = 1.0
"""How long it may take to notice that a data parallel node has ended, after a collective has failed."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to serve after `warm_up`. CUDA graphs are captured for decode steps of `graph_sizes` sequences, and
    for prompts of up to `most_prompt_tokens` that are alone in their step. `pools`: the pool of each rank; that of this
    process is [num_blocks, block_bytes], uint8, which its RankModel owns."""

    engine: Engine
    runner: TorchModelRunner
    graph_sizes: list[int]
    most_prompt_tokens: int
    layer_groups: int
    pools: list[Tensor | RemotePool]
    layout: KvLayout
    device: torch.device
    served_model_name: str
    tokenizer: TokenizerFiles
    checkpoint: Checkpoint
    expert_counts: ExpertCounts | None = None
    expert_exchange_s: Callable[[], float] | None = None
    peers: PeerNodes | None = None
    eplb: Eplb | None = None

    def warm_up(self) -> None:
        """On a GPU, do the work that would delay the first requests. On the engine's thread, before any request; takes
        seconds. Raises ValueError with a one-line message for the user."""
        if not self.on_gpu:
            return
        with out_of_memory("--gpu-memory-utilization: lower it (or take --enforce-eager), CUDA graphs do not fit"):
            began = time.monotonic()
            num_steps = self.runner.warm_up()
            log.info("steps rehearsed num_steps=%d seconds=%.2f", num_steps, time.monotonic() - began)
            if self.graph_sizes:
                self._capture()

    def _capture(self) -> None:
        began = time.monotonic()
        try:
            self.runner.capture(self.graph_sizes, self.most_prompt_tokens)
        except RuntimeError as error:
            if (why := fast.why_not_captured(self.runner.model)) is None:
                raise
            raise ValueError(f"--enforce-eager: needed, since steps cannot be CUDA graphs: {why} ({error})") from error
        sizes = ",".join(map(str, self.graph_sizes))
        log.info("graphs captured sizes=%s seconds=%.2f", sizes, time.monotonic() - began)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def experts(self) -> ExpertReadings | None:
        if (counts := self.expert_counts) is None:
            return None
        return ExpertReadings(
            tokens=lambda: counts.total().sum(0).tolist(),
            imbalance=counts.imbalance,
            num_rebalances=lambda: 0 if self.eplb is None else self.eplb.num_rebalances,
            rank_imbalance=counts.rank_imbalance if counts.num_parts > 1 else None,
            exchange_s=self.expert_exchange_s,
        )

    @property
    def generation_defaults(self) -> GenerationDefaults:
        return self.checkpoint.generation_defaults


def build(settings: NodeSettings, wake: Callable[[], None] | None = None, ranks: Ranks | None = None) -> LoadedModel:
    """Load the model of `settings`, or rank 0's part of it, and size all that it needs. wake: see TorchModelRunner.
    ranks: the further ranks, which load theirs meanwhile. Takes seconds to minutes. Raises ValueError with a one-line
    message for the user."""
    if settings.num_ranks > 1 and ranks is None:
        raise ValueError("--tensor-parallel-size: more than one rank needs a node of its own")
    checkpoint = Checkpoint.find(settings.model, settings.revision)
    peers = _meet_peers(settings, checkpoint, wake) if settings.data_parallel_size > 1 else None
    if ranks is None and peers is None:
        return _build(settings, checkpoint, wake, None, ONE_STAGE)
    if ranks is not None and peers is not None:
        ranks.settle = lambda: peers.why_lost(_NOTICED_S)
    try:
        at = None if peers is None else peers.rendezvous.store
        weights = partial(fingerprint_of, settings, checkpoint)
        everyone = ONE_RANK if ranks is None else ranks.join(device_of(settings), at, weights)
        return _build(settings, checkpoint, wake, ranks, Pipeline(everyone, settings.pipeline_parallel_size), peers)
    except RuntimeError as error:  # of a collective: another rank has ended
        if peers is not None and (why := peers.why_lost(_NOTICED_S)) is not None:
            raise StartupError(why) from error
        if ranks is None:
            raise
        raise ranks.why(error) from error


def _meet_peers(settings: NodeSettings, checkpoint: Checkpoint, wake: Callable[[], None] | None) -> PeerNodes:
    max_model_len, dtype = settings.max_model_len or checkpoint.max_model_len, dtype_of(settings)
    device = device_of(settings).type
    serves = {
        "the command": settings.prog,
        "the version": baton.__version__,
        "--max-model-len": str(max_model_len),
        "--model": f"weights {fingerprint_of(settings, checkpoint)[:12]}",
        "--tensor-parallel-size": str(settings.tensor_parallel_size),
        "--device": device,
        "--dtype": "float32" if dtype == "auto" and device == "cpu" else dtype,
        "--quantization": str(settings.quantization),
        "--eplb-config": str(settings.eplb),
    }
    if device == "cuda":
        serves |= _same_graphs(settings)
    return join_nodes(settings, serves, wake or (lambda: None))


def _same_graphs(settings: NodeSettings) -> dict[str, str]:
    """The flags on which CUDA graphs, and the steps before their capture, depend: all nodes capture and replay them
    together."""
    sizes = sorted({min(size, settings.max_num_seqs) for size in settings.cudagraph_capture_sizes or ()})
    flags = {
        "--max-num-seqs": str(settings.max_num_seqs),
        "--max-num-batched-tokens": str(settings.batched_tokens(on_gpu=True)),
        "--cudagraph-capture-sizes": ",".join(map(str, sizes)) or "its default",
        "--target-itl": "none" if settings.target_itl_s is None else "a target",
    }
    if settings.enforce_eager:
        flags = dict.fromkeys(flags, "any")
    return {"--enforce-eager": str(settings.enforce_eager), **flags}


def _build(
    settings: NodeSettings,
    checkpoint: Checkpoint,
    wake: Callable[[], None] | None,
    ranks: Ranks | None,
    pipeline: Pipeline,
    peers: PeerNodes | None = None,
) -> LoadedModel:
    tokenizer, checkpoint = _with_tokenizer(settings, checkpoint)
    data = ONE_NODE if peers is None else join_ranks(settings, 0, peers.rendezvous.store, device_of(settings))
    part = load_part(settings, checkpoint, pipeline, data)
    config, device = part.config, part.model.device
    layer_groups = settings.layer_groups(device.type == "cuda")
    expert_counts = _expert_counts(settings, part, pipeline)
    eplb = _eplb(settings, part.model, expert_counts)
    with out_of_memory(_POOL_ADVICE):
        runner = TorchModelRunner(
            part.model,
            config,
            part.probed,
            wake=wake,
            layer_groups=layer_groups,
            pipeline=pipeline,
            others=NO_OTHERS if ranks is None else ranks.others,
            data=data,
            waves=peers or NO_WAVES,
            eplb=eplb,
        )
    layout = layout_of(settings, checkpoint, part.kv, part.groups)
    pools: list[Tensor | RemotePool] = [runner.pool.as_bytes()]
    if ranks is not None:
        pools += ranks.pools()
    return LoadedModel(
        engine=Engine(config, runner, keep_up=runner.keep_up),
        runner=runner,
        graph_sizes=_graph_sizes(settings, config, device),
        most_prompt_tokens=settings.captured_prompt_tokens,
        layer_groups=layer_groups,
        pools=pools,
        layout=layout,
        device=device,
        served_model_name=settings.model_name,
        tokenizer=tokenizer,
        checkpoint=checkpoint,
        expert_counts=expert_counts,
        expert_exchange_s=part.expert_exchange_s,
        eplb=eplb,
        peers=peers,
    )


def _expert_counts(settings: NodeSettings, part: Part, pipeline: Pipeline) -> ExpertCounts | None:
    """The counts of chosen experts; on a GPU only if something needs them, since counting makes a decode step a few per
    cent slower."""
    if part.model.device.type == "cuda" and not settings.enable_eplb:
        return None
    return ExpertCounts.of(part.model, _num_expert_parts(settings, pipeline), part.probed.layers[0])


def _eplb(settings: NodeSettings, model: PreTrainedModel, counts: ExpertCounts | None) -> Eplb | None:
    config = settings.eplb
    if config is None or counts is None:
        return None
    return Eplb(counts.total, expert_slots(model), config.window_size, config.step_interval, config.log_every)


def _num_expert_parts(settings: NodeSettings, pipeline: Pipeline) -> int:
    """Ranks among which whole experts are divided."""
    return settings.data_parallel_size * pipeline.peers.size if settings.enable_expert_parallel else 1


def _graph_sizes(settings: NodeSettings, config: EngineConfig, device: torch.device) -> list[int]:
    """Sizes of decode steps to capture. Empty: no CUDA graphs."""
    if not settings.captures_graphs or device.type != "cuda":
        return []
    wanted = settings.cudagraph_capture_sizes or decode_capture_sizes(config.max_num_seqs)
    return sorted({min(size, config.max_num_seqs) for size in wanted})


def _with_tokenizer(settings: NodeSettings, checkpoint: Checkpoint) -> tuple[TokenizerFiles, Checkpoint]:
    """The checkpoint's tokenizer, whose EOS token ends answers too. If it has none, and weights are dummies, whose
    output is meaningless anyway, baton-tiny's."""
    if settings.load_format == "dummy" and not has_tokenizer(checkpoint.path):
        log.warning("%s has no tokenizer: baton-tiny's stands in for it", checkpoint.path)
        return read_tokenizer(EMBEDDED["baton-tiny"]), checkpoint
    tokenizer = read_tokenizer(checkpoint.path)
    return tokenizer, checkpoint.also_ending_at(tokenizer.eos_token_id)
