"""Computes batches of chunks with a Hugging Face model over a pool of KV blocks."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from baton.prompt_logprobs import PromptLogprobs
from baton_kernels.event_thread import EventThread
from engine.config import EngineConfig
from engine.model import batch, prompt_logprobs
from engine.model.batch import BatchSize
from engine.model.choices import Sampled
from engine.model.extensions import BatchExtension
from engine.model.graphs import StepGraph
from engine.model.input_batch import InputBatch
from engine.model.kv_pool import KvPool
from engine.model.layer_marks import LayerMarks
from engine.model.other_ranks import NO_OTHERS, OtherRanks
from engine.model.parallel.data_parallel import NO_WAVES, ONE_NODE, DataParallel, Waves
from engine.model.parallel.eplb import Eplb
from engine.model.parallel.pipeline import ONE_STAGE, Pipeline
from engine.model.probe import Probe, probe
from engine.model.prompt_logprobs import Scored, ScoredPiece
from engine.model.rank import RankModel, Score
from engine.model.rank_step import ALL_TOKENS, EAGER, Int32Array, RankStep
from engine.model.sampler import Sampler, SamplingTensors
from engine.model.staged_step import Sample, StagedStep, StagedSteps
from engine.model.warm_up import first_steps
from engine.sequence import Sequence
from engine.step import Begun, Choice, Chunk, LaunchedStep

_MEETINGS_KNOWN = 16
"""The shortest of the last so many meetings of data parallel nodes counts as one without a wait."""


class TorchModelRunner:
    """The engine's ModelRunner: one forward per step, prefill chunks and decodes flattened into one row of tokens.

    While serving, only `LaunchedStep.wait` waits for a GPU. Owns `rank`, rank 0's part of the model and of the KV pool,
    and drives `others`, the other ranks. Raises UnsupportedModel.

    model: must have been loaded by `load.loader.load_model`, for this rank's place in `pipeline`, and in `data` if the
    node shares its experts with other nodes; then it also takes part in the `waves` of their steps. probed: the probe,
    if it was made before to size the pool. wake: is called, on a thread of its own, when a GPU or the last stage is
    done with a step, and when a GPU is done with a group of layers of a step that ends a prompt to hand off.
    layer_groups: the number of these groups. extensions: what the model takes for each token besides its id. eplb:
    decides when experts move.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: EngineConfig,
        probed: Probe | None = None,
        *,
        wake: Callable[[], None] | None = None,
        layer_groups: int = 1,
        extensions: tuple[BatchExtension, ...] = (),
        pipeline: Pipeline = ONE_STAGE,
        others: OtherRanks = NO_OTHERS,
        data: DataParallel = ONE_NODE,
        waves: Waves = NO_WAVES,
        eplb: Eplb | None = None,
    ) -> None:
        probed = probed or probe(model, config.max_model_len)
        self.model = model
        self._config = config
        self._sampler = Sampler(config.max_num_seqs, config.vocab_size, config.eos_token_ids, model.device)
        self.rank = RankModel(
            model,
            config,
            probed,
            self._sampler.last_tokens,
            pipeline=pipeline,
            data=data,
            layer_groups=layer_groups,
            extensions=extensions,
        )
        self._others, self._waves, self._eplb = others, waves, eplb
        self._input_batch = InputBatch(config, self._sampler)
        self._wake = wake
        self._waited_s = 0.0
        """How long the last launch waited for other data parallel nodes: the time of its meeting minus that of the
        shortest recent one, in which no node was late."""
        self._meetings_s: deque[float] = deque(maxlen=_MEETINGS_KNOWN)
        self._watch = EventThread(model.device, "device-watch") if wake and model.device.type == "cuda" else None
        self._staged: StagedSteps | None = None
        if pipeline.stage.size > 1:
            num_layers = model.config.get_text_config().num_hidden_layers
            self._staged = StagedSteps(pipeline, config.vocab_size, num_layers, wake, self._watch)

    @property
    def pool(self) -> KvPool:
        """This rank's pool."""
        return self.rank.pool

    @property
    def only_launches(self) -> bool:
        """See `engine.step.ModelRunner`."""
        return self.rank.device.type != "cpu"

    @torch.inference_mode()
    def warm_up(self) -> int:
        """Compute a step of each kind, so that no request waits for anything that is compiled, planned or loaded at its
        first use. Must run on the thread that will launch, because some of that is kept per thread, and before
        `capture`. Returns the number of steps."""
        self._others.warm_up()
        self.rank.warm_up_kernels()
        steps = first_steps(self._config)
        for chunks in steps:
            self.launch(chunks).wait()
            for chunk in chunks:
                self.forget(chunk.sequence)
        return len(steps)

    def capture(self, decode_sizes: Seq[int], most_prompt_tokens: int) -> None:
        """See RankModel."""
        self._others.capture(decode_sizes, most_prompt_tokens)
        self.rank.capture(decode_sizes, most_prompt_tokens)

    @torch.inference_mode()
    def launch(self, chunks: Seq[Chunk], begun: Begun = lambda waited_s: None) -> LaunchedStep:
        """See `engine.step.ModelRunner`."""
        if self._staged is not None:
            self._staged.before_launch(chunks)
        self._waves.start()
        self._rebalance()
        ordered = batch.singles_first(chunks)
        rows, tables = self._input_batch.place(ordered)
        choices = batch.sample_batch(ordered, rows)
        marks = self._marks(chunks)
        pieces = prompt_logprobs.pieces(ordered, self._config.vocab_size)
        scored: list[Scored] = []

        def score(index: int, piece_logits: Tensor) -> None:
            scored.append(pieces[index].score(piece_logits))

        @torch.inference_mode()
        def sample(tensors: SamplingTensors | None, logits: Tensor) -> TorchStep:
            sampled = self._sampler.launch(logits, tensors)
            step = TorchStep(list(chunks), ordered, sampled, _mark(sampled), marks, len(self.pool.layers), scored)
            self._wake_after(step.events)
            return step

        numbers = self._as_numbers(ordered, rows, tables, pieces)
        if self._staged is not None:
            sample_later = partial(sample, self._sampler.prepare(choices))
            launched = self._begin(self._staged, chunks, numbers, score, sample_later)
            begun(self._waited_s)
            return launched
        logits = self._compute(numbers, marks, score)
        begun(self._waited_s)
        return sample(self._sampler.prepare(choices), logits)  # which the host prepares while the forward runs

    def _wake_after(self, events: Seq[torch.cuda.Event]) -> None:
        if self._watch is not None and self._wake is not None:
            for event in events:
                self._watch.add(event, self._wake)

    def keep_up(self, busy: bool) -> bool:
        """Take part in a step that another data parallel node has begun, without tokens of this node (in vLLM:
        `execute_dummy_batch`), unless busy. Returns whether a step has begun: then launch or call again soon."""
        if not busy and self._waves.running:
            self._rebalance()
            graph, across = self._meet([])
            if any(across):
                packed = np.zeros(0, np.int32) if graph is None else graph.pack([], [])
                self._compute(RankStep.idle(EAGER if graph is None else graph.index, packed, across))
        return self._waves.running

    def _meet(self, chunks: list[Chunk], may_replay: bool = True) -> tuple[StepGraph | None, list[int]]:
        """`RankModel.agree_on_step`, timed. Ends the wave: each step is one, so that idle nodes sleep until a node
        begins the next."""
        began = time.perf_counter()
        graph, across = self.rank.agree_on_step(chunks, may_replay)
        if across:
            self._meetings_s.append(time.perf_counter() - began)
            self._waited_s = self._meetings_s[-1] - min(self._meetings_s)
        self._waves.end()
        return graph, across

    def _rebalance(self) -> None:
        """Between two steps, move the experts of one layer if that is due. Data parallel nodes decide alike, since they
        see the same steps with the same tokens."""
        if self._eplb is None or (change := self._eplb.before_step()) is None:
            return
        began = time.perf_counter()
        self._others.rearrange_experts(change.layer, change.placement)
        self.rank.rearrange_experts(change.layer, change.placement)
        self._eplb.changed(change, time.perf_counter() - began)

    def _begin(
        self, staged: StagedSteps, chunks: Seq[Chunk], step: RankStep, score: Score, sample: Sample
    ) -> StagedStep:
        """Launch the first stage of the step, while the later stages compute earlier steps."""
        self._others.compute(step)
        self.rank.compute(step)
        return staged.launched(chunks, step, score, sample)

    def _compute(self, step: RankStep, marks: LayerMarks | None = None, score: Score | None = None) -> Tensor:
        self._others.compute(step)
        logits = self.rank.compute(step, marks, score)
        return logits if step.num_logits == ALL_TOKENS else logits[: step.num_logits]

    def _as_numbers(
        self, chunks: list[Chunk], rows: list[int], tables: Int32Array, pieces: list[ScoredPiece]
    ) -> RankStep:
        """The step as all ranks get it. Data parallel nodes agree on it here. A step with prompt logprobs is computed
        without a graph."""
        graph, across = self._meet(chunks, may_replay=not pieces)
        size = BatchSize.of(chunks, self.rank.extensions)
        return RankStep(
            graph=EAGER if graph is None else graph.index,
            packed=batch.pack(chunks, rows, size) if graph is None else graph.pack(chunks, rows),
            num_tokens=size.num_tokens,
            num_logits=ALL_TOKENS if size.num_rows is None else size.num_rows,
            lengths=np.array([chunk.length for chunk in chunks], np.int32),
            ends=np.array([chunk.end for chunk in chunks], np.int32),
            tables=tables,
            fresh=np.array(self._fresh_blocks(chunks), np.int32),
            scored=np.array([(piece.first, piece.count) for piece in pieces], np.int32).reshape(-1, 2),
            num_tokens_across_dp=np.array(across, np.int32),
        )

    def _marks(self, chunks: Seq[Chunk]) -> LayerMarks | None:
        """Marks for a step that ends a prompt to hand off, if its layers are sent in groups; else None. With several
        stages, all layers of a stage are sent together."""
        if self._watch is None or self._staged is not None or not self.rank.group_ends:
            return None
        ends = any(chunk.samples_token and chunk.sequence.hand_off for chunk in chunks)
        return LayerMarks(self.rank.group_ends) if ends else None

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """See `engine.step.ModelRunner`."""
        self._others.copy_blocks(pairs)
        self.rank.copy_blocks(pairs)

    def forget(self, sequence: Sequence) -> None:
        """See `engine.step.ModelRunner`."""
        self._input_batch.forget(sequence)
        if self._staged is not None:
            self._staged.forgotten(sequence)

    def _fresh_blocks(self, chunks: Seq[Chunk]) -> list[int]:
        """On a CPU, the blocks that a chunk starts to fill but does not complete. Their empty slots may hold old KV,
        and the reference attention requires finite values there. The kernels read no slot past a sequence's end."""
        if self.only_launches:
            return []
        size, width = self._config.block_size, self._config.table_shape.width
        return [
            block
            for chunk in chunks
            if chunk.end % size and chunk.end // size * size >= chunk.start
            for block in chunk.sequence.block_table[chunk.end // size * width :][:width]
        ]


@dataclass(frozen=True, slots=True)
class TorchStep:
    """Implements `engine.step.LaunchedStep`. `done`: the event after which the choices are on the host; None on a
    CPU."""

    chunks: list[Chunk]
    ordered: list[Chunk]
    sampled: Sampled
    done: torch.cuda.Event | None
    marks: LayerMarks | None
    num_layers: int
    scored: list[Scored] = field(default_factory=list)

    @property
    def events(self) -> list[torch.cuda.Event]:
        """The events of the step, in the order in which the stream passes them."""
        marked = self.marks.events if self.marks is not None else []
        return marked if self.done is None else [*marked, self.done]

    def is_done(self) -> bool:
        return self.done is None or bool(self.done.query())  # type: ignore[no-untyped-call]

    def num_layers_done(self) -> int:
        if self.is_done():
            return self.num_layers
        return self.marks.num_done() if self.marks is not None else 0

    def wait(self) -> list[list[Choice]]:
        if self.done is not None:
            self.done.synchronize()
        choices, first = self.sampled.choices(), 0
        own: dict[int, list[Choice]] = {}
        for chunk in self.ordered:
            end = first + chunk.num_logits * len(chunk.sequence.samples)
            own[id(chunk)] = choices[first:end]
            if chunk.num_logits > 1:
                own[id(chunk)] = accepted(choices[first:end], chunk.draft_tokens)
            first = end
        return [own[id(chunk)] for chunk in self.chunks]

    def prompt_logprobs(self) -> list[tuple[Sequence, PromptLogprobs]]:
        return [(scored.sequence, scored.piece()) for scored in self.scored]


def accepted(choices: list[Choice], draft_tokens: Seq[int]) -> list[Choice]:
    """The choices that are valid: the first, and each one after a draft token that equals the choice in its place.
    Draws depend on seed and position, so these are the choices that as many steps without draft tokens would make."""
    held = itertools.takewhile(lambda pair: pair[0].token == pair[1], zip(choices, draft_tokens, strict=False))
    return choices[: 1 + sum(1 for _ in held)]


def _mark(sampled: Sampled) -> torch.cuda.Event | None:
    """Start to copy the choices to the host, and record an event after the copies."""
    sampled.to_host()
    if not sampled.tokens.is_cuda:
        return None
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    return done
