"""Chooses what the next step computes. One scheduler serves both roles; it touches no tensor.

Each sequence has `num_launched_tokens`, which catches up with its tokens. A decode is the case where only the last
token is left (vLLM's v1 scheduler made this the one rule), followed by the sequence's draft tokens, if any. If the
sequence runs ahead, a token counts as soon as a launched step is sampling it. Every step includes all sequences that
generate and have a token to compute, or a few tokens that came at once (`TokenMatcher.forced`). Besides these it has
prompt chunks within a budget of tokens, first of running sequences and then of waiting ones, in the order in which they
are due. The single tokens of decodes use none of the budget: otherwise a prompt as long as the budget would take one
more step whenever another sequence generates. The last token of a prompt with several samples does use it, since each
sample is a choice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from baton.block_hash import BlockHash
from engine.block_manager import BlockManager
from engine.block_tables import BlockTables
from engine.config import EngineConfig
from engine.prefix_cache import Evicted
from engine.prompt_budget import LEAST_CHUNK, PromptBudget
from engine.sequence import Sequence, SequenceState
from engine.step import Chunk
from engine.step_size import EMPTY, StepSize
from engine.step_time import StepTime
from engine.waiting_sequences import WaitingSequences, rank_of


@dataclass(slots=True)
class Plan:
    """A step that is decided but not launched. Block tables already cover its chunks. `evicted`: blocks that were
    evicted for it, and keep their content until it is launched."""

    chunks: list[Chunk] = field(default_factory=list)
    started: list[Sequence] = field(default_factory=list)  # scheduled for the first time
    preempted: list[Sequence] = field(default_factory=list)
    evicted: Evicted = field(default_factory=dict)


class Scheduler:
    """Owns the running sequences and, in `waiting`, the others; allocates blocks for the chunks that it schedules.

    - A waiting sequence is admitted when its lane has room, and blocks for all of its tokens after the prefix hit can
      be allocated or claimed (`engine.block_tables`). If there are too few blocks, all sequences behind it wait too, so
      that it does not starve; if its lane has used up its share, only that lane waits.
    - The sequence that is due first is admitted first: priorities count as waiting time (`baton.priority`).
    - The prompts of a step share a `PromptBudget`, of tokens, of choices for their samples and, with a target for the
      time between tokens, of time.
    - If the block after a sequence's prefix hit is being loaded, the sequence waits until that block is a hit or the
      load has failed. It holds no blocks meanwhile, and other sequences overtake it.
    - Likewise, a sequence waits while its matcher is being compiled.
    - Only generating sequences need more blocks while they run. If none are left, the running sequence that is due last
      is preempted: it gives back all of its blocks and is computed again when its turn comes. Sequences to hand off are
      never preempted, since a prefill node has promised their blocks to a transfer.
    - The beams of a group are preempted together: if only some were, the others would wait and keep their blocks. If
      only some beams of a group run again, the group gives way to sequences that are before it in the queue.
    """

    def __init__(
        self, config: EngineConfig, blocks: BlockManager, tables: BlockTables, step_time: StepTime | None = None
    ) -> None:
        self.num_reserved_seqs = 0
        """Places in the batch reserved for leases; waiting sequences are admitted only to the other places."""
        self._config = config
        self._step_time = step_time or StepTime(config.padding)
        self._blocks = blocks
        self._tables = tables
        self._width, self._block_size = tables.shape.width, config.block_size
        self._has_windows = tables.has_windows
        self._running: dict[Sequence, None] = {}
        self.waiting = WaitingSequences(blocks, config.most_blocks)

    @property
    def running(self) -> Collection[Sequence]:
        return self._running.keys()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_free_seqs(self) -> int:
        """Free places in the batch, without the reserved ones."""
        return self._config.max_num_seqs - self.num_reserved_seqs - len(self._running)

    def reserve_seqs(self, n: int) -> None:
        """Reserve `n` places in the batch; no waiting sequence is admitted to them until `unreserve_seqs`, which the
        caller calls before `Engine.adopt`."""
        self.num_reserved_seqs += n

    def unreserve_seqs(self, n: int) -> None:
        assert n <= self.num_reserved_seqs, f"{n} places given back of {self.num_reserved_seqs} that were promised"
        self.num_reserved_seqs -= n

    def add_running(self, seq: Sequence) -> None:
        """Run a sequence that already has its blocks."""
        seq.move_to(SequenceState.RUNNING)
        self._running[seq] = None

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence from the queue or set that it is in; the caller must release its blocks."""
        self._running.pop(seq, None)
        self.waiting.remove(seq)

    def schedule(self, may_preempt: bool = True, idle_s: float = 0.0) -> Plan:
        """Choose the chunks of a step. Allocates, evicts and preempts; every chunk must then be launched.

        No sequence may be preempted while a launched step uses its blocks: if `may_preempt` is False and a sequence
        would have to be preempted, the plan is empty. idle_s: how long the device will idle before the step, which is
        part of the gap between two tokens.
        """
        plan = Plan()
        lacking = self._lacking()
        if not self._blocks.can_allocate(sum(lacking.values())):
            for seq in lacking:
                seq.draft_tokens = ()  # not worth a preemption
            lacking = self._lacking()
            if not may_preempt and not self._blocks.can_allocate(sum(lacking.values())):
                return plan
        self._extend_tables(plan, lacking)
        budget = self._schedule_running(plan, idle_s)
        if not plan.preempted:  # running sequences need their blocks: admitting now would preempt again
            self._admit(plan, budget)
        return plan

    def _lacking(self) -> dict[Sequence, int]:
        """How many blocks each running sequence's table lacks for the next step; only sequences that lack some."""
        return {seq: num for seq in self._running if (num := self._num_lacking_blocks(seq)) > 0}

    def _extend_tables(self, plan: Plan, lacking: Iterable[Sequence]) -> None:
        """Give each sequence the blocks that its next tokens need, in order of rank."""
        for seq in sorted(lacking, key=rank_of):
            while seq.state is SequenceState.RUNNING and self._num_lacking_blocks(seq) > 0:
                if self._blocks.can_allocate(self._width):
                    self._allocate(plan, seq, self._width)
                else:
                    self._preempt_last(plan)

    def _num_lacking_blocks(self, seq: Sequence) -> int:
        width, block_size = self._width, self._block_size
        needed = len(seq.tokens) + seq.num_pending_tokens + len(seq.draft_tokens)
        lacking = needed * width - len(seq.block_table) * block_size
        if lacking <= 0 or self._to_go(seq) <= 0 or (self._has_windows and self._tables.is_growing(seq)):
            return 0
        return -(-lacking // (width * block_size)) * width

    def _to_go(self, seq: Sequence) -> int:
        return seq.num_tokens_to_go(self._config.max_model_len)

    def _preempt_last(self, plan: Plan) -> None:
        """Preempt the sequence with the highest rank, that is, the one that is due last."""
        # A sequence to hand off never lacks a block, so there is always a victim: at worst the one that needs the
        # block.
        victim = max((seq for seq in self._running if not seq.hand_off), key=rank_of)
        members = victim.beams.members if victim.beams is not None else (victim,)
        for member in [seq for seq in members if seq.state is SequenceState.RUNNING]:
            self._preempt(plan, member)

    def _preempt(self, plan: Plan, victim: Sequence) -> None:
        del self._running[victim]
        victim.move_to(SequenceState.WAITING)
        self._tables.release(victim)
        self.waiting.add_preempted(victim)
        plan.preempted.append(victim)

    def _preempt_stalled(self, plan: Plan, before: Sequence) -> bool:
        """Preempt the running members of a group that is behind `before` and waits for members in the queue; of several
        groups, the last. They have taken their step, so no launched step includes them. Returns False if there is no
        such group."""
        stalled = [seq for seq in self._running if _is_stalled(seq) and seq.rank > before.rank]
        if not stalled:
            return False
        last = max(stalled, key=rank_of).beams
        for seq in [seq for seq in stalled if seq.beams is last]:
            self._preempt(plan, seq)
        return True

    def _schedule_running(self, plan: Plan, idle_s: float) -> PromptBudget:
        """Add chunks of the running sequences, first of those that generate, which wait for no prompt. Returns the
        budget that is left for prompts."""
        prompts = list[tuple[Sequence, int]]()
        has_streams, has_windows = False, self._has_windows
        max_model_len, num_forced = self._config.max_model_len, 0
        most_forced = self._config.max_num_batched_tokens
        for seq in self._running:
            to_go = seq.num_tokens_to_go(max_model_len)
            if to_go > 0 and has_windows and self._tables.is_growing(seq):
                to_go -= len(seq.draft_tokens)
                seq.draft_tokens = ()  # its chunk may end before or between them
                prompts.append((seq, to_go))
            elif to_go == 1 + len(seq.draft_tokens) and len(seq.samples) == 1:
                self._take_chunk(plan, seq, to_go)
                has_streams = True
            elif _is_forced_run(seq, to_go) and num_forced + to_go <= most_forced:
                self._take_chunk(plan, seq, to_go)
                has_streams = True
                num_forced += to_go
            elif to_go > 0:
                prompts.append((seq, to_go))
            elif not seq.hand_off:
                has_streams = True  # its next token is decided when a step retires, and will then wait for this step
        target_s = self._config.target_itl_s if has_streams else None
        budget = self._budget(plan, None if target_s is None else target_s - idle_s, num_forced)
        for seq, to_go in prompts:
            if budget.has_room:
                self._take_prompt(plan, seq, budget, to_go)
        return budget

    def _budget(self, plan: Plan, limit_s: float | None, num_forced: int) -> PromptBudget:
        """The budget for prompts beside the chunks in the plan, of whose tokens `num_forced` belong to forced runs."""
        size = StepSize.of(plan.chunks) if limit_s is not None or num_forced else EMPTY
        return PromptBudget(self._config, self._step_time, size, limit_s, len(plan.chunks))

    def _admit(self, plan: Plan, budget: PromptBudget) -> None:
        waiting = self.waiting
        waiting.end_deferrals()
        while budget.has_room and waiting:
            seq = waiting.first()
            if seq is None:
                return
            if self.num_free_seqs <= 0:
                if self._preempt_stalled(plan, seq):
                    continue
                return
            if seq.awaits_matcher:
                waiting.defer(seq, None)
                continue
            hits, wanted = self._match(seq)
            if wanted is not None:
                waiting.defer(seq, wanted)
                continue
            start = self._tables.num_columns(hits) * self._config.block_size
            if not budget.fitting(start, seq.num_tokens - start, len(seq.samples)):
                return
            if not self._allocate_all(plan, seq, hits):
                if self._preempt_stalled(plan, seq):
                    continue
                waiting.note_short(seq)
                return
            self.remove(seq)
            waiting.hold_lane(seq)
            self.add_running(seq)
            if seq.started_s is None:
                seq.num_cached_tokens = seq.num_computed_tokens
                plan.started.append(seq)
            self._take_prompt(plan, seq, budget, self._to_go(seq))

    def _match(self, seq: Sequence) -> tuple[list[int], BlockHash | None]:
        """The table of the sequence's prefix hit, and the hash of a block that cut the hit short, if one is being
        loaded."""
        if seq.lacks_prompt_logprobs:
            return [], None
        block_size = self._config.block_size
        # The last token is always computed, for its logits, and into a block that is not shared.
        hashes = seq.block_hashes((seq.num_tokens - 1) // block_size, block_size)
        return self._tables.match(hashes)

    def _allocate_all(self, plan: Plan, seq: Sequence, hits: list[int]) -> bool:
        """Give the sequence blocks for all of its tokens: the hits, then fresh blocks or claims to them. Returns False
        if too few are left."""
        if not self._tables.admit(seq, hits):
            return False
        if not self._has_windows:
            plan.evicted |= self._tables.cover(seq, seq.num_tokens)
        return True

    def _allocate(self, plan: Plan, seq: Sequence, n: int) -> None:
        """Append `n` blocks, in whole columns, to the sequence's table."""
        blocks, evicted = self._blocks.allocate(n)
        seq.block_table += blocks
        plan.evicted |= evicted

    def _take_prompt(self, plan: Plan, seq: Sequence, budget: PromptBudget, to_go: int) -> None:
        start = seq.num_launched_tokens
        length = budget.fitting(start, to_go, len(seq.samples))
        if self._has_windows and length:
            plan.evicted |= self._tables.cover(seq, start + length)
            length = min(length, self._tables.num_covered_tokens(seq) - start)
        if length:
            self._take_chunk(plan, seq, length)
            budget.spend(start, length, to_go, len(seq.samples))

    def _take_chunk(self, plan: Plan, seq: Sequence, length: int) -> None:
        chunk = Chunk.of(seq, seq.num_launched_tokens, length)
        seq.num_launched_tokens = chunk.end
        if chunk.num_logits and seq.runs_ahead and seq.generates:
            seq.num_pending_tokens += 1
        plan.chunks.append(chunk)

    def check_integrity(self) -> None:
        """Assert that each sequence is in the queue for its state only, and that the tables of running sequences
        fit."""
        for seq in self._running:
            assert seq.state is SequenceState.RUNNING
            total = seq.num_tokens + seq.num_pending_tokens + len(seq.draft_tokens)
            if seq.beams is None:
                assert seq.num_computed_tokens < seq.num_tokens, f"{seq.attempt_id} has nothing to compute"
            assert seq.num_computed_tokens <= seq.num_launched_tokens <= total, f"{seq.attempt_id} ran past its tokens"
            covered = self._tables.num_covered_tokens(seq)
            assert seq.num_launched_tokens <= covered, f"{seq.attempt_id}: KV outside its table"
            # Blocks for rejected draft tokens stay, and for tokens that a step launched ahead waited for in vain.
            most = total + max(self._config.num_speculative_tokens, self._config.num_steps_ahead)
            assert covered < most + self._config.block_size, f"{seq.attempt_id}: its table is too long"
            self._tables.check_integrity(seq)
        num_claimed = sum(seq.num_claimed_blocks for seq in self._running)
        assert num_claimed == self._blocks.num_claimed, "claimed blocks are miscounted"
        self.waiting.check_integrity()
        assert len({*self._running, *self.waiting}) == self.num_running + len(self.waiting)


def _is_forced_run(seq: Sequence, to_go: int) -> bool:
    """Whether the sequence generates and several of its tokens came at once, since its matcher left no alternative to
    them. What a preempted sequence has to compute again is mostly longer, and waits for its turn as a prompt does."""
    return 0 < to_go <= LEAST_CHUNK and seq.generates and seq.num_launched_tokens >= len(seq.prompt_tokens)


def _is_stalled(seq: Sequence) -> bool:
    """Whether the sequence is a beam that has taken its step and waits for its group, of which a beam is in the
    queue."""
    if seq.beams is None or seq.num_computed_tokens < seq.num_tokens:
        return False
    return any(member.state is SequenceState.WAITING for member in seq.beams.members)
