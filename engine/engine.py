"""The engine: sequences in, one batch per step, tokens out.

With `async_scheduling` a step is launched before the previous one has retired, so that a GPU never waits for Python:

    schedule N+1 -> launch N+1 -> wait for N -> retire N: tokens out -> schedule N+2 ...
                    (N runs)                    (N+1 runs)

A caller with other work does not wait for N, but calls `compute(wait=False)` again when N is done. It launches N+1 no
earlier than `launch_at`, so that new requests can join it.

A sequence whose next token is sampled by N is also in N+1, before the host knows the token. If that token ends the
sequence, or N could not choose one, the sequence's part of N+1 is dropped; the blocks of an ended sequence are released
when N+1 retires, since N+1 writes into one of them. A sequence that does not run ahead is not in N+1: its next step is
decided when N has retired (see `propose`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

from baton.errors import InvalidRequest
from engine.beam_search import BeamSearch
from engine.block_manager import BlockManager
from engine.block_tables import BlockTables
from engine.config import EngineConfig
from engine.forks import Forks
from engine.holdings import Holding, recount
from engine.in_flight import InFlight
from engine.live_sequences import LiveSequences
from engine.pace import LaunchKind
from engine.scheduler import Plan, Scheduler
from engine.sequence import Sequence, SequenceState
from engine.step import ModelRunner, StepResult
from engine.step_counters import StepCounters
from engine.step_output import StepOutput
from engine.step_size import EMPTY, StepSize
from engine.step_timing import StepTiming
from engine.tier import KvTier, allocate


class Engine:
    """Runs sequences to their end. Owned by one thread; nothing here blocks except the model.

    Sequences come by `add` or `adopt`, and leave when they finish or by `sequences.release`. `waiting` has the waiting
    sequences, `scheduler` has the running ones and reserves places in the batch, `sequences` parks sequences, and
    `beam_search` runs beam searches.

    A sequence's blocks belong to it from its admission until it finishes, is preempted or is released. With `hand_off`
    it is parked after its prompt and keeps them until it is released. Blocks that a caller gets from `allocate`, as a
    role does for its leases, are the caller's until it releases them to `blocks`, or `adopt` takes them over. `tier`
    gets each evicted block while its content is still there. `keep_up`, for a data parallel node, takes part in a step
    of the other nodes, unless its argument says that this node is busy. It returns whether one of them has begun
    another step, so that it must be called again soon.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        clock: Callable[[], float] = time.monotonic,
        tier: KvTier | None = None,
        keep_up: Callable[[bool], bool] = lambda busy: False,
    ) -> None:
        self.config = config
        self.clock = clock
        self.blocks = BlockManager(config.num_blocks)
        self._runner = runner
        self._tier, self._keep_up = tier, keep_up
        self._timing = StepTiming(config, clock)
        self.tables = BlockTables(config, self.blocks)
        self.scheduler = Scheduler(config, self.blocks, self.tables, self._timing.step_time)
        self.waiting = self.scheduler.waiting
        self._in_flight: deque[InFlight] = deque()
        self._num_ahead = config.num_steps_ahead
        self._decided = 0.0  # when the turn that made the last plan began
        self._adopted_since: float | None = None  # when the first sequence since the last launch was adopted
        self.sequences = LiveSequences(config, self.blocks, self.tables, self.scheduler, runner, self._in_flight)
        self._forks = Forks(self.blocks, self.tables, self.scheduler, runner, self.sequences, tier)
        self.beam_search = BeamSearch(config, self.blocks, self.scheduler, self.sequences, self._forks)
        self._output = StepOutput(config, self.tables, self.sequences, self._forks)
        self.launches_early = False
        """Set by the caller while other work could delay a launch on this thread at any time: then steps are launched
        as soon as there is room."""
        self.counters = StepCounters()
        """How steps spend their time."""
        self.num_preemptions = 0
        """How many times a sequence was preempted."""

    # ---- state ----

    @property
    def num_running(self) -> int:
        return self.scheduler.num_running

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def only_launches(self) -> bool:
        """Whether the runner computes on a separate device, so that a launch only starts the step. The device idles
        until the launch, so callers put off what can wait until after it. If False, `compute` takes as long as the step
        itself, or as its first stage."""
        return self._runner.only_launches

    @property
    def has_work(self) -> bool:
        """Whether a sequence runs or waits. There may still be no room for it in a step: see `StepResult.again`."""
        return bool(self.num_running or self.num_waiting)

    @property
    def has_room(self) -> bool:
        """Whether one more step may be launched. If not, the oldest must retire first."""
        return len(self._in_flight) <= self._num_ahead

    @property
    def launch_at(self) -> float | None:
        """When to launch the next step, by the engine's clock; requests that arrive before then can join it. None: at
        once, or when the oldest step has retired. It is also at once if sequences wait for room, since later ones would
        be behind them; with several stages, since the first one is free; and while `launches_early`."""
        if self.config.num_stages > 1:
            return None
        if self.launches_early or not self.has_room or not self.num_running or self._oldest_is_done:
            return None
        if self.num_waiting > self.waiting.num_deferred:
            return None
        prompts = bool(self._in_flight) and self._in_flight[-1].leaves_prompts
        return self._timing.pace.launch_at(LaunchKind(prompts, self._adopted_since is not None))

    @property
    def device_busy_since(self) -> float | None:
        """When the device started the oldest launched step, by the engine's clock. None: none is in flight."""
        return self._timing.pace.busy_since

    @property
    def prompt_tokens_per_s(self) -> float:
        """See `StepTiming.prompt_tokens_per_s`."""
        return self._timing.prompt_tokens_per_s(bool(self.num_running))

    def layers_computed(self) -> dict[Sequence, int]:
        """For each sequence whose last token a launched step computes, how many layers have that token's KV, and thus
        the KV of all earlier tokens, since steps are computed in order. Sequences for which no layer is known to be
        done are left out."""
        computed: dict[Sequence, int] = {}
        for launched in self._in_flight:
            if num_layers := launched.step.num_layers_done():
                computed |= dict.fromkeys((c.sequence for c in launched.chunks if c.samples_token), num_layers)
        return computed

    # ---- in ----

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Raises InvalidRequest, with the numbers, if it can never run. Token ids must be within the
        vocabulary, which is checked where messages are read (`wire.Limits`)."""
        self._require_possible(seq)
        self.waiting.add(seq)

    def adopt(self, seq: Sequence, outputs: dict[int, tuple[int, ...]], spare_blocks: list[int]) -> list[Sequence]:
        """Take over a sequence whose KV was computed elsewhere; its samples run from the next step on.

        outputs: the output tokens of each unfinished sample, all of one length; the last token has no KV yet, so KV of
            N = len(prompt) + len(output) - 1 tokens is in the blocks.
        seq.block_table: N // block_size + 1 columns, the last with room for the next token; spare_blocks: a column for
            each sample but the first. All become the engine's. Hashes set by `set_block_hashes` are used for its
            blocks.
        Returns one running sequence per sample, in the order of `outputs`; `seq` itself is finished.
        """
        num_computed = len(seq.prompt_tokens) + len(next(iter(outputs.values()))) - 1
        assert all(len(seq.prompt_tokens) + len(output) - 1 == num_computed for output in outputs.values())
        assert len(spare_blocks) == (len(outputs) - 1) * self.tables.shape.width
        table = self.tables.take(seq)
        self.tables.give_back_behind(table, num_computed)  # the table may already have no blocks behind the windows
        seq.move_to(SequenceState.FINISHED)
        seq.started_s = seq.arrived_s
        num_full = num_computed // self.config.block_size
        num_shared = num_full if len(outputs) == 1 else len(seq.prompt_tokens) // self.config.block_size
        children = [seq.child(sample, output, num_shared) for sample, output in outputs.items()]
        self.sequences.seal(children[0], table, 0, num_full)
        self._forks.start(children, table, num_computed, spare_blocks)
        if self._adopted_since is None:
            self._adopted_since = self.clock()
        return children

    def allocate(self, n: int) -> list[int]:
        """`n` blocks that belong to the caller and may be written from now on. All or nothing: raises
        CacheExhausted."""
        return allocate(self.blocks, self._tier, n)

    def propose(self, seq: Sequence, draft_tokens: Seq[int]) -> None:
        """Have the sequence's next step verify these draft tokens. The accepted ones and one more token become its next
        tokens, all at once. Of a long draft only the beginning is used, and nothing if there are too few blocks.
        `seq.takes_drafts` must hold."""
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
        self.sequences.release_ended()
        if not self.has_room:
            return Plan()
        began = time.perf_counter()
        idle_s = 0.0
        if self.config.target_itl_s is not None:
            kind = LaunchKind(prompts=True, newcomers=self._adopted_since is not None)
            idle_s = self._timing.pace.idle_s(now, kind, idle=self._oldest_is_done)
        plan = self.scheduler.schedule(may_preempt=not self._in_flight, idle_s=idle_s)
        self.counters.scheduled(began, launches=bool(plan.chunks))
        for seq in plan.preempted:
            self._runner.forget(seq)
        self.num_preemptions += len(plan.preempted)
        for seq in plan.started:
            seq.started_s = now
        return plan

    def compute(self, plan: Plan, wait: bool = True) -> StepResult:
        """Launch the plan's step. Then retire the oldest step in flight, if more are in flight than the engine may be
        ahead by, or if the plan is empty. wait: wait for that step; otherwise it retires only if it is done."""
        result = StepResult()
        if plan.chunks:
            self._launch(plan)
        retires = len(self._in_flight) > (self._num_ahead if plan.chunks else 0) and (wait or self._oldest_is_done)
        if retires:
            self._retire(self._in_flight.popleft(), result)
        self.sequences.release_ended()
        moved = retires or bool(plan.chunks or plan.preempted)  # others may have room after a preemption
        result.again = (self.has_work and self.has_room and moved) or (wait and bool(self._in_flight))
        result.again |= self._oldest_is_done
        # Take part in another node's step only if no step of our own can follow at once: otherwise two nodes would each
        # join the other's step without their own requests, in turn. Results go out first, since meeting the others may
        # take long.
        busy = bool(plan.chunks) or retires
        if busy or not (self._in_flight or result.again):
            result.again |= self._keep_up(busy)
        return result

    def _launch(self, plan: Plan) -> None:
        if plan.evicted and self._tier is not None:
            self._tier.store(plan.evicted)
        began, counted = self.clock(), time.perf_counter()
        size, others_s = EMPTY, 0.0

        def begun(waited_s: float) -> None:
            nonlocal size, others_s
            size, others_s = StepSize.of(plan.chunks), waited_s
            self._timing.pace.launched(
                size,
                self._decided,
                self.clock(),
                idle=self._oldest_is_done,
                newcomers_since=self._decided if self._adopted_since is None and plan.started else self._adopted_since,
                waited_s=waited_s,
            )

        step = self._runner.launch(plan.chunks, begun)
        launch_s = self.clock() - began - others_s
        self.counters.launched(counted, computes=not self.only_launches)
        self._adopted_since = None
        leaves_prompts = not all(chunk.num_logits for chunk in plan.chunks)
        self._in_flight.append(InFlight(plan.chunks, step, size, self._decided, launch_s, leaves_prompts))

    def retire(self) -> StepResult:
        """Retire the oldest step in flight if it is done. Launches nothing and does not wait. Blocks of ended sequences
        are released by the next call of `schedule` or `compute`, so that the caller can pass on tokens first: releasing
        those of a long sequence takes a millisecond."""
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
        took_s = self._timing.learn(retired)
        if any(chunk.sequence.lacks_prompt_logprobs for chunk in retired.chunks):
            self._output.report_prompts(retired.step, result)
        apply = self._output.apply
        for chunk, choices in zip(retired.chunks, waited, strict=True):
            result.num_tokens += chunk.length
            if chunk.sequence.state is SequenceState.RUNNING:
                if failure := next((choice.failure for choice in choices if choice.failure), None):
                    result.failed.append((chunk.sequence, failure))
                    choices = []
                apply(chunk, choices, result)
        for group in dict.fromkeys(c.sequence.beams for c in retired.chunks if c.sequence.beams is not None):
            if group.members and group.is_complete:
                self.beam_search.advance(group, result)
        self.sequences.ended += retired.released
        goes_on = not self._in_flight and bool(self.num_running)
        result.device_s = took_s if self.only_launches else 0.0
        self.counters.retired(retired.size, result.num_tokens - num_before, result.device_s, ended, goes_on)

    # ---- checks ----

    def _require_possible(self, seq: Sequence) -> None:
        limit = self.config.max_model_len
        if not seq.tokens:
            raise InvalidRequest("the prompt is empty", "prompt")
        if seq.num_tokens >= limit:
            raise InvalidRequest(
                f"the prompt has {seq.num_tokens} tokens, which leaves no room for an answer in a context of {limit}",
                "prompt",
            )
        needed = self.config.most_blocks(seq.num_tokens)
        if needed > self.blocks.num_total:
            raise InvalidRequest(f"the prompt needs {needed} KV blocks of {self.blocks.num_total}", "prompt")

    def check_integrity(self, others: Iterable[Holding] = ()) -> None:
        """Assert that no block is lost: the engine's own holdings and those of the role, `others`, account for all
        blocks."""
        self.scheduler.check_integrity()
        recount(self.blocks, [*self.sequences.holdings(), *others])
        self.sequences.check_integrity()
