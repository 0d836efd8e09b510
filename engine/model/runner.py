"""Computes batches of chunks with a Hugging Face model over a pool of KV blocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from baton.layout import layer_groups_of
from baton.prompt_logprobs import PromptLogprobs
from baton_kernels.event_thread import EventThread
from baton_kernels.paged_attention import warm_up
from engine.config import EngineConfig
from engine.model import batch, prompt_logprobs
from engine.model.attention import Probe, attach, probe
from engine.model.batch import DeviceState, ModelInputs
from engine.model.choices import Sampled
from engine.model.extensions import BatchExtension
from engine.model.graphs import StepGraphs, single_prompt_sizes
from engine.model.input_batch import InputBatch
from engine.model.kv_pool import KvPool
from engine.model.layer_marks import LayerMarks, SeesLayers
from engine.model.prompt_logprobs import HiddenStates, Scored
from engine.model.sampler import Sampler
from engine.model.warm_up import first_steps
from engine.sequence import Sequence
from engine.step import Choice, Chunk


class TorchModelRunner:
    """The engine's ModelRunner: one forward per step, prefill chunks and decodes flattened into one row of tokens.

    While serving, only `LaunchedStep.wait` waits for a GPU. Owns `pool`, runs `model`. The model must have been loaded
    by `load.loader.load_model`; its attention modules are bound to the pool. Pass `probed` if the probe was made
    before, to size the pool. `wake` is called, on a thread of its own, when a GPU is done with a step, or with a group
    of layers of a step that ends a prompt to hand off; `layer_groups`: the number of these groups. `extensions`: what
    the model takes for each token besides its id. Raises UnsupportedModel.
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
    ) -> None:
        probed = probed or probe(model, config.max_model_len)
        self.model = model
        self._config = config
        self.pool = KvPool(probed.kv, config.num_blocks, config.block_size, model.device)
        self._step = attach(probed.layers, self.pool)
        self._sampler = Sampler(config.max_num_seqs, config.vocab_size, config.eos_token_ids, model.device)
        self._input_batch = InputBatch(config, self._sampler, model.device)
        self._state = DeviceState(
            self._input_batch.block_tables, self._sampler.last_tokens, config.block_size, extensions
        )
        self._hidden_states = HiddenStates(model)
        self._graphs: StepGraphs | None = None
        self._wake = wake
        self._watch = EventThread(model.device, "device-watch") if wake and model.device.type == "cuda" else None
        groups = layer_groups_of(len(probed.kv), layer_groups)
        self._group_ends = tuple(end for _, end in groups) if len(groups) > 1 else ()

    @torch.inference_mode()
    def warm_up(self) -> int:
        """Compute a step of each kind, so that no request waits for what is compiled, planned or loaded at first use.
        Must run on the thread that will launch, because some of that is kept per thread, and before `capture`. Returns
        the number of steps."""
        layer, text = self.pool.layers[0], self.model.config.get_text_config()
        longest = min(self._config.max_num_batched_tokens, self._config.max_model_len)
        warm_up(
            text.num_attention_heads,
            layer.num_kv_heads,
            layer.head_dim_k,
            self.model.dtype,
            self.model.device,
            longest,
        )
        steps = first_steps(self._config)
        for chunks in steps:
            self.launch(chunks).wait()
            for chunk in chunks:
                self.forget(chunk.sequence)
        return len(steps)

    @torch.inference_mode()
    def capture(self, decode_sizes: Seq[int], most_prompt_tokens: int) -> None:
        """Capture CUDA graphs of decodes of `decode_sizes` sequences, of the steps with prompts that the config's
        padding lists, and of single prompts of at most `most_prompt_tokens`. Without it, all steps are launched op by
        op."""
        self._graphs = StepGraphs(
            self._forward,
            self._state,
            decode_sizes,
            self._config.padding,
            single_prompt_sizes(self._config.max_num_batched_tokens, most_prompt_tokens),
            self._group_ends,
            decode_query_lens=sorted({1, 1 + self._config.num_speculative_tokens}),
        )

    @torch.inference_mode()
    def launch(self, chunks: Seq[Chunk]) -> TorchStep:
        """See `engine.step.ModelRunner`."""
        ordered = batch.singles_first(chunks)
        rows = self._input_batch.place(ordered)
        columns = self._sampler.prepare(batch.sample_batch(ordered, rows))
        marks = self._marks(chunks)
        scored: list[Scored] = []
        if prompt_logprobs.wanted(ordered):
            logits, scored = self._score(ordered, rows, marks)
        else:
            logits = self._logits(ordered, rows, marks)
        sampled = self._sampler.launch(logits, columns)
        step = TorchStep(list(chunks), ordered, sampled, _mark(sampled), marks, len(self.pool.layers), scored)
        if self._watch is not None and self._wake is not None:
            for event in step.events:
                self._watch.add(event, self._wake)
        return step

    def _marks(self, chunks: Seq[Chunk]) -> LayerMarks | None:
        """Marks for a step that ends a prompt to hand off, if its layers are sent in groups; else None."""
        if self._watch is None or not self._group_ends:
            return None
        ends = any(chunk.samples_token and chunk.sequence.hand_off for chunk in chunks)
        return LayerMarks(self._group_ends) if ends else None

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """See `engine.step.ModelRunner`."""
        self.pool.copy(pairs)

    def forget(self, sequence: Sequence) -> None:
        """See `engine.step.ModelRunner`."""
        self._input_batch.forget(sequence)

    def _logits(self, chunks: Seq[Chunk], rows: list[int], marks: LayerMarks | None = None) -> Tensor:
        """The logits of the last `num_logits` tokens of each chunk, in order: [num_rows, vocab_size]."""
        if self._graphs is not None:
            logits = self._graphs.run(chunks, rows, marks)
            if logits is not None:
                return logits
        return self._forward(self._inputs(chunks, rows), marks)

    def _score(self, chunks: Seq[Chunk], rows: list[int], marks: LayerMarks | None) -> tuple[Tensor, list[Scored]]:
        """As `_logits`, without graphs, and the logprobs of prompts."""
        inputs = self._inputs(chunks, rows)
        with self._hidden_states.kept() as hidden:
            logits = self._forward(inputs, marks)
        head = self._hidden_states.head(_arguments(inputs))
        return logits, prompt_logprobs.score(chunks, hidden[0], head, self._config.vocab_size)

    def _inputs(self, chunks: Seq[Chunk], rows: list[int]) -> ModelInputs:
        if self.model.device.type == "cpu":
            self._clear_fresh_blocks(chunks)
        return batch.build(chunks, rows, self._state)

    def _forward(self, inputs: ModelInputs, marks: SeesLayers | None) -> Tensor:
        self._step.batch, self._step.slot_mapping, self._step.marks = inputs.paged, inputs.slot_mapping, marks
        logits: Tensor = self.model(**_arguments(inputs)).logits[0]
        return logits

    def _clear_fresh_blocks(self, chunks: Seq[Chunk]) -> None:
        """Zero each block that a chunk starts to fill but does not complete: its empty slots may hold other KV, and the
        reference attention requires finite values there. The kernels read no slot past a sequence's end."""
        size = self._config.block_size
        fresh = [
            chunk.sequence.block_table[chunk.end // size]
            for chunk in chunks
            if chunk.end % size and chunk.end // size * size >= chunk.start
        ]
        if fresh:
            self.pool.clear(fresh)


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
        """In the order in which the stream passes them."""
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


def _arguments(inputs: ModelInputs) -> dict[str, Any]:
    """Those of the model's forward."""
    return {
        "input_ids": inputs.input_ids[None],
        "use_cache": False,
        "logits_to_keep": 0 if inputs.keep is None else inputs.keep,
        "position_ids": inputs.positions[None],
        **inputs.extensions,
    }


def accepted(choices: list[Choice], draft_tokens: Seq[int]) -> list[Choice]:
    """The choices that are valid: the first, and each one after a draft token that equals the choice made in its place.
    Draws depend on seed and position, so these are what as many steps without draft tokens would choose."""
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
