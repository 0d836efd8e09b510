"""Computes batches of chunks with a Hugging Face model over a pool of KV blocks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq

import torch
from torch import Tensor
from transformers import PreTrainedModel

from baton_kernels.paged_attention import PagedBatch
from engine.config import EngineConfig
from engine.model.attention import Probe, attach, probe
from engine.model.kv_pool import KvPool
from engine.sampler import SampleBatch, Sampler
from engine.step import Choice, Chunk


class TorchModelRunner:
    """The engine's ModelRunner: one forward per step, prefill chunks and decodes flattened into one row of tokens.

    Owns `pool`. The model must have been loaded by `loader.load_model`; its attention modules are bound to the pool.
    Pass `probed` when the probe was made before, to size the pool. Raises UnsupportedModel.
    """

    def __init__(self, model: PreTrainedModel, config: EngineConfig, probed: Probe | None = None) -> None:
        probed = probed or probe(model)
        self._model = model
        self._block_size = config.block_size
        self.pool = KvPool(probed.shape, config.num_blocks, config.block_size, model.device)
        self._step = attach(probed.layers, self.pool)
        self._sampler = Sampler(config.max_num_seqs, config.vocab_size, config.eos_token_ids, model.device)

    @torch.inference_mode()
    def run(self, chunks: Seq[Chunk]) -> list[list[Choice]]:
        """See `engine.step.ModelRunner`."""
        self._clear_fresh_blocks(chunks)
        logits = self._forward(chunks)
        sampling = [chunk.sequence for chunk in chunks if chunk.samples_token]
        for row, seq in enumerate(sampling):
            self._sampler.begin(row, seq.sampling, seq.prompt_tokens, seq.output_tokens)
        entries = [(row, sample, seq.num_tokens) for row, seq in enumerate(sampling) for sample in seq.samples]
        rows, samples, positions = zip(*entries, strict=True) if entries else ((), (), ())
        choices = iter(self._sampler.launch(logits, SampleBatch(rows, rows, samples, positions)).choices())
        return [
            list(itertools.islice(choices, len(chunk.sequence.samples))) if chunk.samples_token else []
            for chunk in chunks
        ]

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """See `engine.step.ModelRunner`."""
        self.pool.copy(pairs)

    def _forward(self, chunks: Seq[Chunk]) -> Tensor:
        """Logits of the last token of each chunk that samples one: [num_rows, vocab_size], fp32."""
        device = self._model.device
        tables = [chunk.sequence.block_table for chunk in chunks]
        lengths = [chunk.length for chunk in chunks]
        batch = PagedBatch.build(tables, lengths, [chunk.end for chunk in chunks], self._block_size, device)
        tokens = list(itertools.chain.from_iterable(chunk.sequence.tokens[chunk.start : chunk.end] for chunk in chunks))
        ends = itertools.accumulate(lengths)
        rows = [end - 1 for chunk, end in zip(chunks, ends, strict=True) if chunk.samples_token]
        self._step.batch, self._step.slot_mapping = batch, batch.slot_mapping()
        output = self._model(
            input_ids=torch.tensor([tokens], device=device),
            position_ids=torch.from_numpy(batch.positions()).to(device)[None],
            use_cache=False,
            logits_to_keep=torch.tensor(rows, dtype=torch.int64, device=device),
        )
        logits: Tensor = output.logits[0].float()
        return logits

    def _clear_fresh_blocks(self, chunks: Seq[Chunk]) -> None:
        """Zero each block that a chunk begins to fill and does not fill: its empty slots may hold another's KV, and a
        NaN there would spread (see KvPool)."""
        size = self._block_size
        fresh = [
            chunk.sequence.block_table[chunk.end // size]
            for chunk in chunks
            if chunk.end % size and chunk.end // size * size >= chunk.start
        ]
        if fresh:
            self.pool.clear(fresh)
