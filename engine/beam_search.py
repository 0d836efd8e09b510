"""Beam search in the engine: the beams of a request are sequences, which their children replace after each step.

`engine.beams` chooses which beams go on; this module gives them sequences, blocks and places in the batch.
"""

from __future__ import annotations

from baton.errors import InvalidRequest
from engine.beams import CANDIDATES_PER_BEAM, Beam, BeamGroup
from engine.block_manager import BlockManager
from engine.config import EngineConfig
from engine.forks import Forks
from engine.live_sequences import LiveSequences
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.step import StepResult


class BeamSearch:
    """Begins, advances and ends the searches of an engine."""

    def __init__(
        self, config: EngineConfig, blocks: BlockManager, scheduler: Scheduler, sequences: LiveSequences, forks: Forks
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._scheduler = scheduler
        self._sequences = sequences
        self._forks = forks

    def require_possible(self, width: int, num_tokens: int) -> None:
        """Raises InvalidRequest if `width` beams of `num_tokens` tokens might not fit without sharing any block."""
        config = self._config
        if width > config.max_num_seqs:
            raise InvalidRequest(f"beam_width {width} is more than --max-num-seqs {config.max_num_seqs}", "beam_width")
        if CANDIDATES_PER_BEAM * width > config.vocab_size:
            raise InvalidRequest(f"beam_width {width} is more than half of the vocabulary", "beam_width")
        most_blocks = width * config.most_blocks(min(num_tokens, config.max_model_len))
        if most_blocks > self._blocks.num_total:
            text = f"{width} beams of {num_tokens} tokens may need {most_blocks} KV blocks of {self._blocks.num_total}"
            raise InvalidRequest(text, "max_tokens")

    def begin(self, seq: Sequence) -> None:
        """Begin a search: the sequence, which the engine already has, is the first and only beam of its group."""
        assert seq.beams is not None
        seq.beams.members[seq] = Beam()

    def end(self, group: BeamGroup[Sequence]) -> None:
        """Release all sequences of the group. Idempotent."""
        members, group.members = group.members, {}
        for member in members:
            self._sequences.release(member)

    def advance(self, group: BeamGroup[Sequence], result: StepResult) -> None:
        """Replace the group's sequences by the best beams; the beams of one parent share its blocks."""
        parents = list(group.members)
        chosen = group.advance(self._config.max_model_len)
        tables: dict[Sequence, tuple[list[int], list[Sequence]]] = {}
        num_computed = parents[0].num_computed_tokens
        for parent, beam in chosen:
            if parent not in tables:
                tables[parent] = parent.block_table, []
                parent.block_table = []
            child = parent.child(0, beam.tokens, num_computed // self._config.block_size)
            tables[parent][1].append(child)
            group.members[child] = beam
        for parent in parents:
            self._sequences.release(parent)
        if chosen:
            self._place(list(tables.values()), num_computed)
        else:
            result.searched.append(group)

    def _place(self, forks: list[tuple[list[int], list[Sequence]]], num_computed: int) -> None:
        """Run the children of each table if there are blocks and places for the whole group; else all of them wait as
        if preempted."""
        num_children = sum(len(children) for _, children in forks)
        num_fresh = sum(self._forks.num_new_blocks(len(children), num_computed) for _, children in forks)
        fits = num_children <= self._scheduler.num_free_seqs and self._blocks.can_allocate(num_fresh)
        for table, children in forks:
            if fits:
                self._forks.run(children, table, num_computed)
                continue
            self._blocks.release(table)
            for child in children:
                self._scheduler.waiting.add_preempted(child)
