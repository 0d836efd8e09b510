"""The engine: sequences in, one batch per step, tokens out.

With `async_scheduling` a step is launched before the previous one has retired, so that a GPU never waits for Python:

    schedule N+1 -> launch N+1 -> wait for N -> retire N: tokens out -> schedule N+2 ...
                    (N runs)                    (N+1 runs)

A caller with other work does not wait for N, but calls `compute(wait=False)` again when N is done. To let new requests
join N+1, it launches N+1 no earlier than `launch_at`.

A sequence whose token N samples continues in N+1 before the host knows the token. If that token ends the sequence, or N
chose none, its part of N+1 is dropped; the blocks of an ended sequence are released when N+1 retires, since N+1 writes
into one of them. A sequence that does not run ahead is not in N+1: its next step is decided when N has retired (see
`propose`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from baton.block_hash import BlockHash
from baton.errors import InvalidRequest
from baton.layout import num_blocks_for
from baton.sampling import FinishReason
from engine.beams import CANDIDATES_PER_BEAM, Beam, BeamGroup
from engine.block_manager import BlockManager
from engine.config import EngineConfig
from engine.holdings import Holding, recount
from engine.pace import NO_PROMPTS, Pace, StepSize
from engine.prefix_cache import Evicted
from engine.prompt_rate import PromptRate
from engine.scheduler import Plan, Scheduler
from engine.sequence import Sequence, SequenceState
from engine.step import Choice, Chunk, LaunchedStep, ModelRunner, SampledToken, StepResult
from engine.step_counters import StepCounters
from engine.step_time import StepTime
from engine.tier import KvTier
from engine.token_matcher import TokenMatcher

__all__ = ["Choice", "Chunk", "Engine", "LaunchedStep", "ModelRunner", "Plan", "SampledToken", "StepResult"]


@dataclass(frozen=True, slots=True)
class InFlight:
    """A launched step. `released`: block tables of sequences that have ended since, which the engine holds until the
    step retires."""

    chunks: list[Chunk]
    step: LaunchedStep
    size: StepSize
    decided: float  # when its turn began, by the engine's clock
    launch_s: float  # that its launch took
    leaves_prompts: bool  # unfinished, so that the next step continues them
    released: list[tuple[Sequence, list[int]]] = field(default_factory=list)


class Engine:
    """Runs sequences to their end. Owned by one thread; nothing here blocks but the model.

    A sequence's blocks belong to it from its admission until it finishes, is preempted or is released. With
    `hand_off` it is parked after its prompt and keeps them until `release`. Blocks that others `allocate`, as a role
    does for its leases, are theirs until they release them to `blocks`, or `adopt` takes them over. `tier` gets each
    evicted block while its content is still there.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        blocks: BlockManager | None = None,
        clock: Callable[[], float] = time.monotonic,
        tier: KvTier | None = None,
    ) -> None:
        self.config = config
        self.clock = clock
        self.blocks = blocks or BlockManager(config.num_blocks, config.block_size)
        self._runner = runner
        self._tier = tier
        self._step_time = StepTime(config.padding)
        self._scheduler = Scheduler(config, self.blocks, self._step_time)
        self._prompt_rate = PromptRate(config, self._step_time)
        self._decodes = NO_PROMPTS  # the size of the latest step that has retired, without its prompts
        self._sequences: dict[Sequence, None] = {}  # all that are not finished
        self._in_flight: deque[InFlight] = deque()
        self._num_ahead = 1 if config.async_scheduling else 0
        self._pace = Pace(self._step_time.predict_least)
        self._decided = 0.0  # when the turn of the last plan began
        self.counters = StepCounters()
        """Where the time of the steps goes."""
        self.on_sealed: Callable[[Sequence, list[BlockHash], int], None] | None = None
        """Is called with a sequence, the hashes of its blocks so far, and the first of them that is new."""
        self.num_preemptions = 0
        """How often sequences were preempted."""

    # ---- state ----

    @property
    def num_reserved_seqs(self) -> int:
        """Places in the batch reserved for leases; waiting sequences are admitted only to the others."""
        return self._scheduler.num_reserved_seqs

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of prompts of which nothing is computed yet."""
        return self._scheduler.num_waiting_tokens

    @property
    def only_launches(self) -> bool:
        """Whether `compute` returns once a step is launched. The device idles until the launch, so callers defer what
        can wait until after it. If False, `compute` takes as long as the step itself."""
        return self.config.async_scheduling

    @property
    def has_work(self) -> bool:
        """Whether something runs or waits. A step may still find no room for it: see `StepResult.again`."""
        return bool(self.num_running or self.num_waiting)

    @property
    def has_room(self) -> bool:
        """Whether one more step may be launched. If not, the oldest must retire first."""
        return len(self._in_flight) <= self._num_ahead

    @property
    def computing(self) -> list[Chunk]:
        """The chunks of the oldest launched step, which the device is computing as far as the engine knows."""
        return self._in_flight[0].chunks if self._in_flight else []

    @property
    def launch_at(self) -> float | None:
        """When to launch the next step, by the engine's clock; requests that arrive before can join it. None: at once,
        or not before the oldest has retired. At once also if sequences wait for room: later ones are behind them."""
        if not self.has_room or not self.num_running or self._oldest_is_done:
            return None
        if self.num_waiting > self._scheduler.num_not_ready:
            return None
        return self._pace.launch_at(bool(self._in_flight) and self._in_flight[-1].leaves_prompts)

    @property
    def device_busy_since(self) -> float | None:
        """When the device started the oldest launched step, by the engine's clock. None: none is in flight."""
        return self._pace.busy_since

    @property
    def prompt_tokens_per_s(self) -> float:
        """How fast a prompt would be computed beside what runs now, without breaking `target_itl_s`. 0: not known, or
        there is no such limit."""
        return self._prompt_rate.tokens_per_s(self._decodes if self.num_running else NO_PROMPTS, self.clock())

    def layers_computed(self) -> dict[Sequence, int]:
        """For each sequence whose last token a launched step computes: how many layers have its KV, and so that of all
        earlier tokens, since steps are computed in order. Sequences for which no layer is known to be done are left
        out."""
        computed: dict[Sequence, int] = {}
        for launched in self._in_flight:
            if num_layers := launched.step.num_layers_done():
                computed |= dict.fromkeys((c.sequence for c in launched.chunks if c.samples_token), num_layers)
        return computed

    def has_preempted(self, due_s: float) -> bool:
        """Whether a preempted sequence that is due at that time or earlier waits for blocks; requests due then should
        be promised none meanwhile."""
        return self._scheduler.num_preempted_up_to(due_s) > 0

    def num_waiting_up_to(self, due_s: float) -> int:
        """Waiting sequences that are due at that time or earlier."""
        return self._scheduler.num_waiting_up_to(due_s)

    def watch_steps(self, call: Callable[[], None] | None) -> None:
        """Have `call` called at the end of each step from now on; None: nothing is."""
        self.counters.watcher = call

    # ---- in ----

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Raises InvalidRequest, with the numbers, when it can never run. Token ids must be within
        the vocabulary, which is checked where they are read (`wire.Limits`)."""
        self._require_possible(seq)
        self._sequences[seq] = None
        self._scheduler.add(seq)

    def adopt(self, seq: Sequence, outputs: dict[int, tuple[int, ...]], spare_blocks: list[int]) -> list[Sequence]:
        """Take over a sequence whose KV was computed elsewhere; its samples run from the next step on.

        outputs: the output tokens of each unfinished sample, all of one length; the last token has no KV yet, so KV of
            N = len(prompt) + len(output) - 1 tokens is in the blocks.
        seq.block_table: N // block_size + 1 blocks, the last with room for the next token; spare_blocks: one for each
            sample but the first. All become the engine's. Hashes set by `set_block_hashes` are used for its blocks.
        Returns one running sequence per sample, in the order of `outputs`; `seq` itself is finished.
        """
        num_computed = len(seq.prompt_tokens) + len(next(iter(outputs.values()))) - 1
        assert all(len(seq.prompt_tokens) + len(output) - 1 == num_computed for output in outputs.values())
        assert len(spare_blocks) == len(outputs) - 1
        table, seq.block_table = seq.block_table, []
        seq.move_to(SequenceState.FINISHED)
        seq.started_s = seq.arrived_s
        num_full = num_computed // self.config.block_size
        num_shared = num_full if len(outputs) == 1 else len(seq.prompt_tokens) // self.config.block_size
        children = [seq.child(sample, output, num_shared) for sample, output in outputs.items()]
        self._seal(children[0], table, 0, num_full)
        self._start_forks(children, table, num_computed, spare_blocks)
        return children

    def release(self, seq: Sequence) -> None:
        """End a sequence in any state, and give its blocks back. Idempotent.

        The blocks are released once no launched step uses them.

        """
        if seq.state is SequenceState.FINISHED:
            return
        if seq.state is SequenceState.PARKED and seq.stops:
            self._scheduler.unreserve_seqs(1)
        self._scheduler.remove(seq)
        self._scheduler.leave_lane(seq)
        self._runner.forget(seq)
        self._sequences.pop(seq, None)
        table, seq.block_table = seq.block_table, []
        if seq.in_flight:
            self._in_flight[-1].released.append((seq, table))
        else:
            self.blocks.release(table)
        seq.move_to(SequenceState.FINISHED)

    # ---- out, and back ----

    def stop(self, seq: Sequence) -> None:
        """Launch no step with a running sequence any more. It `is_settled` when those that are launched have
        retired."""
        seq.stops = True
        seq.draft_tokens = ()

    def is_settled(self, seq: Sequence) -> bool:
        """Whether a sequence that stops has all of its tokens, and KV of all but the last, and may be parked."""
        return seq.stops and seq.state is SequenceState.RUNNING and not seq.in_flight

    def park(self, seq: Sequence) -> None:
        """Take a settled sequence out of the batch. It keeps its blocks and its place, until `release` or
        `resume`."""
        assert self.is_settled(seq)
        self._scheduler.remove(seq)
        self._scheduler.reserve_seqs(1)
        self._runner.forget(seq)
        seq.move_to(SequenceState.PARKED)

    def resume(self, seq: Sequence) -> None:
        """Go on with a sequence that stops, parked or not yet."""
        seq.stops = False
        if seq.state is SequenceState.PARKED:
            self._scheduler.unreserve_seqs(1)
            self._scheduler.add_running(seq)

    def allocate(self, n: int) -> list[int]:
        """`n` blocks that belong to the caller and may be written from now on. All or nothing: raises
        CacheExhausted."""
        blocks, evicted = self.blocks.allocate(n)
        self._store(evicted)
        return blocks

    def _store(self, evicted: list[Evicted]) -> None:
        """Pass evicted blocks to the tier before they are overwritten."""
        if evicted and self._tier:
            self._tier.store(evicted)

    def reserve_seqs(self, n: int) -> None:
        """Reserve `n` places in the batch. The caller gives them back with `unreserve_seqs`, before `adopt`."""
        self._scheduler.reserve_seqs(n)

    def unreserve_seqs(self, n: int) -> None:
        self._scheduler.unreserve_seqs(n)

    def leave_lane(self, seq: Sequence) -> None:
        """Stop counting the sequence's blocks against its lane's share: the other node has room for it."""
        self._scheduler.leave_lane(seq)

    def propose(self, seq: Sequence, draft_tokens: Seq[int]) -> None:
        """Have the sequence's next step verify these draft tokens: those accepted, and one more, are its next tokens,
        all at once. Of a long draft only the beginning is used, and none of it if blocks are short. `seq.takes_drafts`
        must hold."""
        assert seq.takes_drafts
        room = min(
            self.config.num_speculative_tokens,
            seq.sampling.max_tokens - seq.num_output_tokens - 1,
            self.config.max_model_len - seq.num_tokens - 1,
        )
        seq.draft_tokens = tuple(draft_tokens[: max(room, 0)])

    # ---- step ----

    def schedule(self, now: float) -> Plan:
        """Decide the next step, which the caller must pass to `compute` before any other call. Without room for a step
        it is empty.

        now: when the caller's turn began, by the engine's clock. `schedule` and `compute` are separate so that the
        caller can report what was decided while it is computed.
        """
        self._decided = now
        if not self.has_room:
            return Plan()
        began = time.perf_counter()
        plan = self._scheduler.schedule(may_preempt=not self._in_flight)
        self.counters.scheduled(began, launches=bool(plan.chunks))
        for seq in plan.preempted:
            self._runner.forget(seq)
        self.num_preemptions += len(plan.preempted)
        for seq in plan.started:
            seq.started_s = now
        return plan

    def compute(self, plan: Plan, wait: bool = True) -> StepResult:
        """Launch the plan's step. Then retire the oldest one in flight, if more are in flight than the engine may be
        ahead, or if the plan is empty. wait: wait for that step; otherwise it retires only if it is done."""
        result = StepResult()
        if plan.chunks:
            self._store(plan.evicted)
            began, counted = self.clock(), time.perf_counter()
            step = self._runner.launch(plan.chunks)
            launch_s = self.clock() - began
            self.counters.launched(counted, computes=not self.only_launches)
            size = StepSize.of(plan.chunks)
            self._pace.launched(size, self._decided, self.clock(), idle=self._oldest_is_done)
            leaves_prompts = not all(chunk.num_logits for chunk in plan.chunks)
            self._in_flight.append(InFlight(plan.chunks, step, size, self._decided, launch_s, leaves_prompts))
        retires = len(self._in_flight) > (self._num_ahead if plan.chunks else 0) and (wait or self._oldest_is_done)
        if retires:
            self._retire(self._in_flight.popleft(), result)
        moved = retires or bool(plan.chunks)
        result.again = (self.has_work and self.has_room and moved) or (wait and bool(self._in_flight))
        result.again |= self._oldest_is_done
        return result

    def retire(self) -> StepResult:
        """Retire the oldest step in flight if it is done. Launches nothing and does not wait."""
        result = StepResult()
        if self._oldest_is_done:
            self._retire(self._in_flight.popleft(), result)
        return result

    @property
    def _oldest_is_done(self) -> bool:
        return bool(self._in_flight) and self._in_flight[0].step.is_done()

    def _retire(self, retired: InFlight, result: StepResult) -> None:
        """Wait for a step, and apply its output, except to sequences that have ended since it was launched."""
        waited = retired.step.wait()
        ended, num_before = time.perf_counter(), result.num_tokens
        took_s = self._learn_time(retired)
        if any(chunk.sequence.lacks_prompt_logprobs for chunk in retired.chunks):
            self._report_prompts(retired.step, result)
        for chunk, choices in zip(retired.chunks, waited, strict=True):
            result.num_tokens += chunk.length
            if chunk.sequence.state is SequenceState.RUNNING:
                if failure := next((choice.failure for choice in choices if choice.failure), None):
                    result.failed.append((chunk.sequence, failure))
                    choices = []
                self._apply_output(chunk, choices, result)
        for group in dict.fromkeys(c.sequence.beams for c in retired.chunks if c.sequence.beams is not None):
            if group.members and group.is_complete:
                self._advance(group, result)
        for _, table in retired.released:
            self.blocks.release(table)
        goes_on = not self._in_flight and bool(self.num_running)
        device_s = took_s if self.only_launches else 0.0
        self.counters.retired(retired.size, result.num_tokens - num_before, device_s, ended, goes_on)

    def _learn_time(self, retired: InFlight) -> float:
        """Learn how long a step took: on a device of its own from the end of the one before, else with its turn.
        Returns how long the device had it, 0 if that is unknown."""
        now = self.clock()
        device_s = took_s = self._pace.retired(now)
        if self.config.target_itl_s is None:
            return device_s or 0.0
        if not self.only_launches:
            took_s = now - retired.decided
        self._decodes = StepSize.of(chunk for chunk in retired.chunks if chunk.is_decode)
        if took_s is not None:  # a launch may have computed the step, on a CPU
            self._step_time.learn(retired.size, max(took_s, retired.launch_s))
        return device_s or 0.0

    def _report_prompts(self, step: LaunchedStep, result: StepResult) -> None:
        """Report the logprobs of prompts. Each token's are reported once, even if it is computed again."""
        for seq, piece in step.prompt_logprobs():
            if seq.state is SequenceState.RUNNING:
                assert piece.first_index == seq.num_scored_tokens + 1, f"{seq.attempt_id}: prompt logprobs out of order"
                seq.num_scored_tokens += piece.num_tokens
                result.prompt_logprobs.append((seq, piece))

    def _apply_output(self, chunk: Chunk, choices: list[Choice], result: StepResult) -> None:
        """Append the sequence's tokens, and seal its full blocks."""
        seq = chunk.sequence
        if chunk.start != seq.num_computed_tokens:  # the step before it chose no token
            self._settle(chunk, seq.num_computed_tokens)
            return
        if seq.hand_off or chunk.start < len(seq.prompt_tokens):
            result.advanced.append(seq)
        if seq.generates:
            sampled = self._append(chunk, choices)
            self._settle(chunk, min(chunk.end, len(seq.tokens) - 1))
            if sampled and sampled[-1].finish:
                self.release(seq)
        elif seq.beams is not None:
            sampled = []
            if choices:
                assert choices[0].logprobs is not None
                seq.beams.record(seq, choices[0].logprobs)
            self._settle(chunk, chunk.end if choices else min(chunk.end, len(seq.tokens) - 1))
        elif choices:
            sampled = [
                self._check_stop(seq, sample, choice, seq.matcher and seq.matcher.fork())
                for sample, choice in zip(seq.samples, choices, strict=True)
            ]
            self._settle(chunk, chunk.end)
            sampled = self._park(seq, sampled) if seq.hand_off else self._fork(seq, sampled)
        else:
            sampled = []
            self._settle(chunk, min(chunk.end, len(seq.tokens) - 1))
        result.sampled += sampled
        if seq.matcher is not None:
            result.failed += [(token.sequence, token.error) for token in sampled if token.error is not None]

    def _append(self, chunk: Chunk, choices: list[Choice]) -> list[SampledToken]:
        """The sequence's next tokens, up to the one that ends it: those chosen, and those that must follow them."""
        seq, sampled = chunk.sequence, []
        assert len(choices) <= chunk.num_logits, f"{seq.attempt_id}: a step chose tokens that it has no logits of"
        if chunk.num_logits and seq.num_pending_tokens:
            seq.num_pending_tokens -= 1
        if chunk.num_logits > 1:
            seq.draft_tokens = ()  # checked
        for choice in _and_forced(seq, choices):
            sampled.append(self._check_stop(seq, seq.samples[0], choice, seq.matcher))
            seq.tokens.append(choice.token)
            if sampled[-1].finish:
                break
        return sampled

    def _settle(self, chunk: Chunk, num_computed: int) -> None:
        """Count the sequence's first `num_computed` tokens as computed, and seal its full blocks. Its last token counts
        only once its logits have chosen. Any KV of the chunk beyond that will be overwritten."""
        seq, block_size = chunk.sequence, self.config.block_size
        self._seal(seq, seq.block_table, chunk.start // block_size, num_computed // block_size)
        seq.num_computed_tokens = num_computed
        if num_computed != chunk.end == seq.num_launched_tokens:
            seq.rewind(num_computed)

    def _check_stop(self, seq: Sequence, sample: int, choice: Choice, matcher: TokenMatcher | None) -> SampledToken:
        """Whether the token ends its sample, and why. matcher: the sample's own, which accepts the token."""
        index, token, sampling = seq.num_output_tokens, choice.token, seq.sampling
        finish: FinishReason | None = None
        stop_token_id: int | None = None
        if matcher is not None:
            matcher.accept(token)
        if token in self.config.eos_token_ids and not sampling.ignore_eos:
            finish = FinishReason.STOP
        elif token in sampling.stop_token_ids:
            finish, stop_token_id = FinishReason.STOP, token
        elif matcher is not None and matcher.finished:
            finish = FinishReason.STOP
        elif index + 1 >= sampling.max_tokens or seq.num_tokens + 1 >= self.config.max_model_len:
            finish = FinishReason.LENGTH
        error = matcher.error if matcher is not None else None
        return SampledToken(seq, sample, index, token, choice.logprobs, finish, stop_token_id, error)

    def _park(self, seq: Sequence, sampled: list[SampledToken]) -> list[SampledToken]:
        self._scheduler.remove(seq)
        self._runner.forget(seq)
        seq.move_to(SequenceState.PARKED)
        return sampled

    # ---- forks ----

    def _fork(self, seq: Sequence, sampled: list[SampledToken]) -> list[SampledToken]:
        """Each sample becomes a sequence of its own; finished ones hold no blocks, the others share the prompt's KV."""
        table, seq.block_table = seq.block_table, []
        self.release(seq)
        num_computed = seq.num_computed_tokens
        num_full = num_computed // self.config.block_size
        owned = [
            replace(token, sequence=seq.child(token.sample, (*seq.output_tokens, token.token), num_full))
            for token in sampled
        ]
        for token in owned:
            if token.finish:
                token.sequence.move_to(SequenceState.FINISHED)
        self._place_forks([token.sequence for token in owned if not token.finish], table, num_computed)
        return owned

    def _place_forks(self, children: list[Sequence], table: list[int], num_computed: int) -> None:
        """Run as many of the children as there are blocks and places for; the others wait as if preempted."""
        room = self._num_new_blocks(num_computed)
        num_running = min(len(children), max(self._scheduler.num_free_seqs, 1))
        while num_running and not self.blocks.can_allocate(num_running - 1 + room):
            num_running -= 1
        if num_running:
            fresh = self.allocate(num_running - 1 + room)
            self._start_forks(children[:num_running], table + fresh[:room], num_computed, fresh[room:])
        else:
            self.blocks.release(table)
        for child in children[num_running:]:
            self._sequences[child] = None
            self._scheduler.requeue(child)

    def _num_new_blocks(self, num_computed: int) -> int:
        """How many blocks the first of the forks lacks for its next token."""
        return 1 if num_computed % self.config.block_size == 0 else 0

    def _start_forks(self, children: list[Sequence], table: list[int], num_computed: int, spares: list[int]) -> None:
        tables, copies = self.blocks.fork(table, num_computed, spares)
        if copies:
            self._runner.copy_blocks(copies)
        for child, own in zip(children, tables, strict=True):
            child.block_table = own
            child.rewind(num_computed)
            self._sequences[child] = None
            self._scheduler.add_running(child)

    # ---- beams ----

    def begin_search(self, seq: Sequence) -> None:
        """The sequence, which is here, is the first and only beam of its group."""
        assert seq.beams is not None
        seq.beams.members[seq] = Beam()

    def end_search(self, group: BeamGroup) -> None:
        """Release all sequences of the group. Idempotent."""
        members, group.members = group.members, {}
        for member in members:
            self.release(member)

    def _advance(self, group: BeamGroup, result: StepResult) -> None:
        """The best beams become the group's sequences; those of one parent share its blocks."""
        parents = list(group.members)
        chosen = group.advance(self.config.max_model_len)
        tables: dict[Sequence, tuple[list[int], list[Sequence]]] = {}
        num_computed = parents[0].num_computed_tokens
        for parent, beam in chosen:
            if parent not in tables:
                tables[parent] = parent.block_table, []
                parent.block_table = []
            child = parent.child(0, beam.tokens, num_computed // self.config.block_size)
            tables[parent][1].append(child)
            group.members[child] = beam
        for parent in parents:
            self.release(parent)
        if chosen:
            self._place_beams(list(tables.values()), num_computed)
        else:
            result.searched.append(group)

    def _place_beams(self, forks: list[tuple[list[int], list[Sequence]]], num_computed: int) -> None:
        """Run the children beside each table, if there are blocks and places for all of the group's; else all wait as
        if preempted."""
        room = self._num_new_blocks(num_computed)
        num_children = sum(len(children) for _, children in forks)
        num_fresh = num_children - len(forks) + room * len(forks)
        fits = num_children <= self._scheduler.num_free_seqs and self.blocks.can_allocate(num_fresh)
        for table, children in forks:
            if fits:
                fresh = self.allocate(len(children) - 1 + room)
                self._start_forks(children, table + fresh[:room], num_computed, fresh[room:])
                continue
            self.blocks.release(table)
            for child in children:
                self._sequences[child] = None
                self._scheduler.requeue(child)

    # ---- checks ----

    def _seal(self, seq: Sequence, table: list[int], first: int, end: int) -> None:
        """Seal blocks [first, end) of the table, which are full of the sequence's KV."""
        if first == end:
            return
        names = seq.block_hashes(end, self.config.block_size)
        for i in range(first, end):
            self.blocks.seal(table[i], names[i])
        if self.on_sealed is not None:
            self.on_sealed(seq, names, first)

    def _require_possible(self, seq: Sequence) -> None:
        limit = self.config.max_model_len
        if not seq.tokens:
            raise InvalidRequest("the prompt is empty", "prompt")
        if seq.num_tokens >= limit:
            raise InvalidRequest(
                f"the prompt has {seq.num_tokens} tokens, which leaves no room for an answer in a context of {limit}",
                "prompt",
            )
        needed = num_blocks_for(seq.num_tokens, self.config.block_size)
        if needed > self.blocks.num_total:
            raise InvalidRequest(f"the prompt needs {needed} KV blocks of {self.blocks.num_total}", "prompt")

    def require_search_possible(self, width: int, num_tokens: int) -> None:
        """Raises InvalidRequest if so many beams of so many tokens may not fit, without sharing any block."""
        config = self.config
        if width > config.max_num_seqs:
            raise InvalidRequest(f"beam_width {width} is more than --max-num-seqs {config.max_num_seqs}", "beam_width")
        if CANDIDATES_PER_BEAM * width > config.vocab_size:
            raise InvalidRequest(f"beam_width {width} is more than half of the vocabulary", "beam_width")
        most_blocks = width * num_blocks_for(min(num_tokens, config.max_model_len), config.block_size)
        if most_blocks > self.blocks.num_total:
            text = f"{width} beams of {num_tokens} tokens may need {most_blocks} KV blocks of {self.blocks.num_total}"
            raise InvalidRequest(text, "max_tokens")

    def holdings(self) -> list[Holding]:
        """The sequences that hold blocks, including ended ones whose blocks a launched step still uses."""
        held = [(seq, seq.block_table) for seq in self._sequences if seq.block_table]
        held += [released for launched in self._in_flight for released in launched.released]
        return [
            Holding(
                "sequence", seq.state.value, seq.attempt_id, tuple(seq.samples), seq.started_s or seq.arrived_s, table
            )
            for seq, table in held
        ]

    def check_integrity(self, others: Iterable[Holding] = ()) -> None:
        """Assert that no block is lost: the engine's own holdings and the role's `others` account for all."""
        self._scheduler.check_integrity()
        recount(self.blocks, [*self.holdings(), *others])
        for seq in self._sequences:
            self._check_writable(seq)

    def _check_writable(self, seq: Sequence) -> None:
        """Assert that the blocks which the sequence's next step may write are neither sealed nor shared."""
        if seq.state is SequenceState.RUNNING:
            for block in seq.block_table[seq.num_computed_tokens // self.config.block_size :]:
                assert self.blocks.hash_of(block) is None, f"{seq.attempt_id} would write the sealed block {block}"
                assert self.blocks.num_owners(block) == 1, f"{seq.attempt_id} would write the shared block {block}"


def _and_forced(seq: Sequence, choices: list[Choice]) -> Iterator[Choice]:
    """The choices; then, once the sequence's matcher has accepted these, the tokens that must come next. One step
    computes the KV of them all."""
    yield from choices
    if choices and seq.takes_forced and seq.matcher is not None:
        yield from map(Choice, seq.matcher.forced())
