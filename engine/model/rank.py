"""One rank of a node: its part of the model and of the KV pool, and its part of each forward."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from baton.layout import layer_groups_of
from baton_kernels.paged_attention import warm_up
from baton_kernels.step_inputs import update_block_tables
from engine.config import EngineConfig
from engine.model import batch
from engine.model.attention import attach
from engine.model.batch import BatchSize, DeviceState, ModelInputs
from engine.model.experts import expert_blocks
from engine.model.extensions import BatchExtension
from engine.model.graphs import NO_GRAPH, StepGraph, StepGraphs, StepNeeds, single_prompt_sizes
from engine.model.kv_pool import KvPool
from engine.model.layer_marks import SeesLayers
from engine.model.missing_modules import received_by
from engine.model.parallel.data_parallel import ONE_NODE, DataParallel
from engine.model.parallel.expert_placement import Placement
from engine.model.parallel.expert_slots import expert_slots
from engine.model.parallel.pipeline import ONE_STAGE, Pipeline
from engine.model.probe import Probe
from engine.model.prompt_logprobs import HiddenStates
from engine.model.rank_step import ALL_TOKENS, EAGER, RankStep
from engine.model.upload import readable, upload
from engine.step import Chunk

Score = Callable[[int, Tensor], None]
"""Takes the logits of a piece of `RankStep.scored`, by its index: [tokens, vocab_size]."""


class RankModel:
    """Owns the rank's `pool`, and the block tables on its device; runs `model`, whose attention modules are bound to
    the pool. All ranks of a node must make the same calls, but for `agree_on_step`, in the same order.

    last_tokens: [max_num_seqs] int32, the last token of each row of the batch. The sampler writes rank 0's; the other
    ranks of the first stage get them with each step. pipeline, data: the rank's place, for which the model was loaded;
    data parallel nodes must meet, then compute, together.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: EngineConfig,
        probed: Probe,
        last_tokens: Tensor,
        *,
        pipeline: Pipeline = ONE_STAGE,
        data: DataParallel = ONE_NODE,
        layer_groups: int = 1,
        extensions: tuple[BatchExtension, ...] = (),
    ) -> None:
        self.model, self.pipeline, self._data = model, pipeline, data
        self.device: torch.device = model.device  # the model searches its parameters for it
        self.group = pipeline.peers
        self._config = config
        self.pool = KvPool(probed.kv, config.num_blocks, config.block_size, self.device, probed.groups)
        self._steps = attach(probed.layers, self.pool, self.group.size)
        shape = config.table_shape
        assert shape.width == len(self._steps), f"tables of {shape.width} groups for {len(self._steps)}"
        dims = shape.width, config.max_num_seqs, shape.num_columns(config.max_model_len)
        tables = torch.zeros(dims, dtype=torch.int32, device=self.device)
        self._state = DeviceState(tables, last_tokens, config.block_size, extensions)
        self._hidden_states = HiddenStates(model)
        self._received = received_by(model)
        self._expert_blocks = expert_blocks(model)
        self._expert_slots = expert_slots(model)
        self.graphs: StepGraphs | None = None
        """The steps that `capture` has captured. None: all steps are launched op by op."""
        groups = layer_groups_of(len(probed.kv), layer_groups)
        self.group_ends = tuple(end for _, end in groups) if len(groups) > 1 else ()

    @property
    def extensions(self) -> tuple[BatchExtension, ...]:
        return self._state.extensions

    def warm_up_kernels(self) -> None:
        """Compile and load what attention needs. Must run on the thread that will compute."""
        layer, text = self.pool.layers[0], self.model.config.get_text_config()
        warm_up(
            text.num_attention_heads // self.group.size,
            layer.num_kv_heads,
            layer.head_dim_k,
            self.model.dtype,
            self.device,
            min(self._config.max_num_batched_tokens, self._config.max_model_len),
        )

    @torch.inference_mode()
    def capture(self, decode_sizes: Seq[int], most_prompt_tokens: int) -> None:
        """Capture CUDA graphs of decodes of `decode_sizes` sequences, of the steps with prompts that the config's
        padding lists, and of single prompts of at most `most_prompt_tokens`. Without it, all steps are launched op by
        op."""
        most_alone = most_prompt_tokens if self._data.num_nodes == 1 else 0  # other nodes add tokens or padding
        self.graphs = StepGraphs(
            self._forward_padded,
            self._state,
            decode_sizes,
            self._config.padding,
            single_prompt_sizes(self._config.max_num_batched_tokens, most_alone),
            self.group_ends,
            decode_query_lens=sorted({1, 1 + self._config.num_speculative_tokens}),
            begin=self._follow_rank_0,
        )

    def agree_on_step(self, chunks: Seq[Chunk], may_replay: bool = True) -> tuple[StepGraph | None, list[int]]:
        """Rank 0 only. The CUDA graph for these chunks, in the order of `singles_first`, None to launch op by op; and
        the number of tokens of each data parallel node, [] if there is one node. Several nodes agree here on one graph.
        A node without chunks takes part, too; if all counts are 0, there is no step. may_replay: False if the step
        wants what no graph has."""
        if self._data.num_nodes == 1:
            return self.graphs.fitting(chunks) if self.graphs is not None and chunks and may_replay else None, []
        needs = StepNeeds.of(chunks) if may_replay else NO_GRAPH
        met = self._data.agree_on_step(sum(chunk.length for chunk in chunks), needs)
        graph = None if self.graphs is None else self.graphs.with_room(StepNeeds(*met.needs))
        return graph, met.num_tokens_across_dp

    @torch.inference_mode()
    def compute(self, step: RankStep, marks: SeesLayers | None = None, score: Score | None = None) -> Tensor:
        """Launch the step. Returns its logits, [num_logits, vocab_size]; those of a graph have padding rows at the end,
        and are valid until the next step. score: takes the logits that `step.scored` asks for. With several stages, all
        but the last return hidden states, and the last one sends its logits to rank 0: the scored ones first."""
        if step.num_tokens_across_dp.size:
            self._data.begin(step.num_tokens_across_dp.tolist())
        if step.tables.size:
            index, blocks = readable(step.tables, self.device).unbind()
            update_block_tables(self._state.block_tables, index, blocks)
        if step.fresh.size:
            self.pool.clear(step.fresh.tolist())
        if step.graph != EAGER:
            assert self.graphs is not None
            return self.graphs.run(step.graph, step.packed, marks)
        self._follow_rank_0()
        if not step.num_tokens:
            return self._compute_experts()
        return self._compute(step, self._inputs(step), marks, score)

    @torch.inference_mode()
    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks of the pool, given as (source, destination) pairs. The ranks of one stage finish together:
        a source may be freed at once, and a transfer may write into it as soon as rank 0 is done. Later stages may
        finish later: only their own steps write into their pools, after the copy, since nodes that receive KV have one
        stage."""
        self._follow_rank_0()
        self.pipeline.follow_rank_0()
        self.pool.copy(pairs)
        self.group.all_reduce(torch.zeros(1, device=self.pool.tensor.device))

    def rearrange_experts(self, layer: int, placement: Placement) -> None:
        """Between two steps, exchange the weights of a layer's experts with the other ranks, so that the slots hold
        this placement, see `ExpertSlots`. layer: counted over layers with experts."""
        self._expert_slots[layer].rearrange(placement)

    def _follow_rank_0(self) -> None:
        """Order the following reads and writes of KV after rank 0's work by receiving a tensor from it, as later stages
        do by receiving hidden states. On GPUs, copies between a pool and slots are ordered only with the steps of rank
        0 (`kv_transfer.slot_copies`), including the copies of this rank's pool."""
        if self.pipeline.stage.is_first:
            self.group.broadcast(self._state.last_tokens)

    def _compute_experts(self) -> Tensor:
        """Compute the rank's part of a step in which its own node has no tokens. Returns no logits."""
        for context in self._steps:
            context.row_slot_mapping = None
        width = self.model.config.get_text_config().hidden_size
        no_rows = torch.empty(1, 0, width, dtype=self.model.dtype, device=self.device)
        for block in self._expert_blocks:
            block(no_rows)
        return no_rows[0]

    def _compute(self, step: RankStep, inputs: ModelInputs, marks: SeesLayers | None, score: Score | None) -> Tensor:
        stage = self.pipeline.stage
        if self._received is not None:
            width = self.model.config.get_text_config().hidden_size
            self._received.hidden = self.pipeline.receive_hidden(step.num_tokens, width, self.model.dtype)[None]
        if not stage.is_last:
            hidden = self._forward(inputs, marks)
            self.pipeline.send_hidden(hidden)
            return hidden
        if stage.is_first:
            return self._logits(step, inputs, marks, score)
        logits = self._logits(step, inputs, marks, lambda _, piece: self.pipeline.send_logits(piece))
        self.pipeline.send_logits(logits if step.num_logits == ALL_TOKENS else logits[: step.num_logits])
        return logits

    def _logits(self, step: RankStep, inputs: ModelInputs, marks: SeesLayers | None, score: Score | None) -> Tensor:
        """The step's logits. `score` first gets those of each piece of `step.scored`."""
        if not len(step.scored):
            return self._forward(inputs, marks)
        with self._hidden_states.kept() as hidden:
            logits = self._forward(inputs, marks)
        head = self._hidden_states.head(_arguments(inputs))
        for index, (first, count) in enumerate(step.scored.tolist()):
            piece = head(hidden[0][first : first + count])
            if score is not None:
                score(index, piece)
        return logits

    def _inputs(self, step: RankStep) -> ModelInputs:
        num_rows = None if step.num_logits == ALL_TOKENS else step.num_logits
        size = BatchSize(len(step.lengths), step.num_tokens, num_rows, self.extensions)
        packed = upload(step.packed, self.device)
        return batch.unpack(packed, size, self._state, step.lengths.tolist(), step.ends.tolist())

    def _forward_padded(self, inputs: ModelInputs, marks: SeesLayers | None) -> Tensor:
        """The forward that graphs capture; all data parallel nodes replay it together."""
        slots = inputs.groups[0].slot_mapping
        if self._data.num_nodes > 1:
            self._data.begin([len(slots)] * self._data.num_nodes)
            slots = self._data.gather(slots[:, None])[:, 0]
        return self._forward(inputs, marks, slots)

    def _forward(self, inputs: ModelInputs, marks: SeesLayers | None, row_slot_mapping: Tensor | None = None) -> Tensor:
        """Logits; in a stage before the last, hidden states, [num_tokens, hidden_size]. row_slot_mapping: see
        StepContext."""
        for step, group in zip(self._steps, inputs.groups, strict=True):
            step.batch, step.slot_mapping, step.marks = group.paged, group.slot_mapping, marks
            step.row_slot_mapping = row_slot_mapping
        arguments = _arguments(inputs)
        if self.pipeline.stage.is_last:
            logits: Tensor = self.model(**arguments).logits[0]
            return logits
        del arguments["logits_to_keep"]
        # The stand-ins for later layers and the norm return their input.
        hidden: Tensor = self.model.base_model(**arguments).last_hidden_state[0]
        return hidden


def _arguments(inputs: ModelInputs) -> dict[str, Any]:
    """The arguments of the model's forward."""
    return {
        "input_ids": inputs.input_ids[None],
        "use_cache": False,
        "logits_to_keep": 0 if inputs.keep is None else inputs.keep,
        "position_ids": inputs.positions[None],
        **inputs.extensions,
    }
