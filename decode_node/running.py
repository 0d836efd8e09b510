"""The requests that generate on a decode node, from adoption or a local prompt to their end.

For each request in the engine: its deadline, the sequence of each of its samples, and the Adopted that the router has
yet to get.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from baton.deadlines import Deadlines
from baton.errors import BatonError, DeadlineExceeded
from baton.messages import AttemptId, End, HandedOff, SampleEnd, Started, Tokens
from baton.node_times import PromptTimes, StepGaps
from decode_node.leases import Lease
from engine.beams import BeamGroup
from engine.engine import Engine
from engine.sequence import Sequence
from engine.step import Chunk, SampledToken
from engine.token_matcher import TokenMatcher
from node.fences import Fences
from node.outbox import Outbox


@dataclass(slots=True)
class Running:
    """A request in this node's engine, and the sequence of each live sample (one for all until a local prompt forks).
    `move`: the number of the last Migrate for it, here or on the node that it came from. `started`, `computed`: when
    the first chunk of a local prompt was scheduled, and its first token sampled."""

    attempt_id: AttemptId
    received: float
    deadline: float
    sequences: dict[int, Sequence]
    beams: BeamGroup[Sequence] | None = None  # of a beam search, which has the sequences instead
    samples: tuple[int, ...] = ()  # of a beam search: which of the best beams are wanted
    move: int = 0
    started: float = 0.0
    computed: float = 0.0
    num_chunks: int = 0
    gaps: StepGaps = field(default_factory=StepGaps)

    def end(self, error: BatonError | None = None) -> End:
        """The last message, with the times of the request's work here."""
        prompt = None
        if self.started and self.computed:
            started_s, computed_s = self.started - self.received, self.computed - self.received
            prompt = PromptTimes(max(0.0, started_s), max(0.0, computed_s), self.num_chunks)
        return End(error, prompt, self.gaps.times())


class RunningRequests:
    """Releases the sequences that were added to the engine or adopted, and sends to routers through `outbox`. `fences`
    knows the stopped samples."""

    def __init__(self, engine: Engine, outbox: Outbox, fences: Fences) -> None:
        self._engine = engine
        self._outbox = outbox
        self._fences = fences
        self._running: dict[AttemptId, Running] = {}
        self._deadlines = Deadlines[AttemptId]()
        self._adopted: dict[AttemptId, Lease] = {}  # requests whose first step has not begun
        self._begin_next: set[AttemptId] = set()  # those of them whose step is launched, and begins when one retires
        self._ended: list[AttemptId] = []

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, attempt_id: AttemptId) -> bool:
        return attempt_id in self._running

    def attempts(self) -> list[AttemptId]:
        """All attempts here."""
        return [*self._running]

    def get(self, attempt_id: AttemptId) -> Running | None:
        return self._running.get(attempt_id)

    def take_ended(self) -> list[AttemptId]:
        """The attempts that have ended here since the last call, or that another node has taken."""
        ended, self._ended = self._ended, []
        return ended

    def next_deadline(self) -> float | None:
        return self._deadlines.next()

    # ---- in ----

    def add(self, sequence: Sequence, samples: tuple[int, ...], now: float, deadline: float) -> None:
        """Add a local prompt that is already in the engine, as one sequence for all samples."""
        running = Running(sequence.attempt_id, now, deadline, dict.fromkeys(sequence.samples, sequence))
        if sequence.beams is not None:
            running = Running(sequence.attempt_id, now, deadline, {}, sequence.beams, samples)
            self._engine.beam_search.begin(sequence)
        self._add(running)

    def adopt(self, lease: Lease, matcher: TokenMatcher | None, now: float) -> None:
        """Put a request whose KV is all here into the next step. The engine takes over the lease's blocks. matcher: of
        a sample without output."""
        commit, attempt_id = lease.commit, lease.reserve.attempt_id
        assert commit is not None
        stopped = self._fences.stopped(attempt_id)
        outputs = {s.index: s.output_tokens for s in commit.samples if s.index not in stopped}
        samples, beams = tuple(sample.index for sample in commit.samples), lease.extras.beams
        if beams is not None and outputs:
            outputs = {0: ()}
        shape, num_tokens = self._engine.tables.shape, lease.num_tokens
        needed = max(0, len(outputs) - 1) * shape.width
        self._engine.blocks.release(lease.spares[needed:])
        num_full = num_tokens // shape.block_size
        num_kept = (num_full + 1) * shape.width
        self._engine.blocks.release(lease.table[num_kept:])
        del lease.table[num_kept:]
        if not outputs:
            self._engine.blocks.release(lease.table)
            self._outbox.to_router(attempt_id, End())
            return
        sequence = Sequence(
            attempt_id=attempt_id,
            samples=list(outputs),
            prompt_tokens=commit.prompt_tokens,
            sampling=commit.sampling if beams is None else BeamGroup.sampling_of(commit.sampling),
            cache_salt=commit.cache_salt,
            arrived_s=now,
            age_s=now - lease.since_s,
            priority=lease.reserve.priority,
            block_table=lease.table,
            num_cached_tokens=lease.num_cached_tokens,
            matcher=matcher,
            processors=lease.extras.processors,
            beams=beams,
        )
        sequence.set_block_hashes(lease.reserve.block_hashes[:num_full])
        adopted = self._engine.adopt(sequence, outputs, lease.spares[:needed])
        own = {s.samples[0]: s for s in adopted}
        running = Running(attempt_id, now, lease.deadline, own, move=lease.reserve.move)
        if beams is not None:
            running = Running(attempt_id, now, lease.deadline, {}, beams, samples)
            self._engine.beam_search.begin(adopted[0])
        self._add(running)
        self._adopted[attempt_id] = lease

    def _add(self, running: Running) -> None:
        self._running[running.attempt_id] = running
        self._deadlines.set(running.attempt_id, running.deadline)

    # ---- what the engine did ----

    def tell_started(self, sequences: Iterable[Sequence], now: float) -> None:
        for sequence in sequences:
            running = self._running[sequence.attempt_id]
            running.started = now
            started = Started(sequence.num_cached_tokens, now - running.received)
            self._outbox.to_router(sequence.attempt_id, started)

    def launching(self, chunks: Seq[Chunk]) -> None:
        """Report those adopted requests whose first step is the one with these chunks, which this turn launches.

        If prompts fill the step up, they are reported when it begins. It is launched some milliseconds before, and then
        takes as long as the target for the gap between two tokens: a first token that is passed on at the launch would
        be followed by the second too late.
        """
        if self._adopted:
            first_steps = self._adopted.keys() & {chunk.sequence.attempt_id for chunk in chunks}
            if self._engine.device_busy_since is not None and self._is_filled_up(chunks):
                self._begin_next |= first_steps
            else:
                self._tell_adopted(first_steps)

    def _is_filled_up(self, chunks: Seq[Chunk]) -> bool:
        has_target = self._engine.config.target_itl_s is not None
        return has_target and not all(chunk.is_decode for chunk in chunks)

    def step_retired(self) -> None:
        """A step has ended, so the one launched after it has begun."""
        if self._begin_next:
            began, self._begin_next = self._begin_next, set()
            self._tell_adopted(began)

    def _tell_adopted(self, attempt_ids: Iterable[AttemptId]) -> None:
        for attempt_id in attempt_ids:
            self._outbox.to_router(attempt_id, self._adopted.pop(attempt_id).adopted(self._engine.clock()))

    def advanced(self, sequence: Sequence) -> None:
        """A chunk of a local prompt is computed."""
        if running := self._running.get(sequence.attempt_id):
            running.num_chunks += 1

    def sampled(self, token: SampledToken, now: float) -> None:
        """now: when the results of the token's step were here."""
        running = self._running.get(token.sequence.attempt_id)
        if running is None or token.sample not in running.sequences:
            return  # the sample was stopped before it began; this is a forced token that came with its first
        running.sequences[token.sample] = token.sequence
        running.computed = running.computed or now
        running.gaps.step(now)
        if token.sample in self._fences.stopped(running.attempt_id):  # before its prompt forked
            self._drop_sample(running, token.sample)
            return
        logprobs = (token.logprobs,) if token.logprobs else ()
        self._outbox.to_router(running.attempt_id, Tokens(token.sample, token.index, (token.token,), logprobs))
        if token.finish:
            self._outbox.to_router(running.attempt_id, SampleEnd(token.sample, token.finish, token.stop_token_id))
            self._drop_sample(running, token.sample)

    def searched(self, group: BeamGroup[Sequence]) -> None:
        """A beam search has ended: its best beams, in order, are the samples. Only those that are wanted are sent."""
        running = self._running[group.attempt_id]
        wanted = set(running.samples) - self._fences.stopped(running.attempt_id)
        for sample, beam in enumerate(group.best):
            if sample in wanted:
                self._outbox.to_router(running.attempt_id, Tokens(sample, 0, beam.tokens, beam.logprobs))
                assert beam.finish is not None
                self._outbox.to_router(running.attempt_id, SampleEnd(sample, beam.finish, beam.stop_token_id))
        self._forget(running.attempt_id)
        self._outbox.to_router(running.attempt_id, running.end())

    def moved(self, attempt_id: AttemptId, last_word: HandedOff) -> None:
        """Another decode node has the request, and its sequence here is released."""
        self._forget(attempt_id)
        self._outbox.to_router(attempt_id, last_word)

    # ---- ends ----

    def stop_samples(self, attempt_id: AttemptId, samples: Iterable[int]) -> None:
        """End the samples that have sequences of their own; others end when their sequence forks."""
        running = self._running.get(attempt_id)
        for sample in samples:
            sequence = running.sequences.get(sample) if running else None
            if running and sequence and len(sequence.samples) == 1:
                self._drop_sample(running, sample)

    def end_attempt(self, attempt_id: AttemptId, error: BatonError) -> None:
        """A no-op if it is not here."""
        if running := self._running.get(attempt_id):
            self._forget(attempt_id)
            for sequence in running.sequences.values():
                self._engine.sequences.release(sequence)
            if running.beams is not None:
                self._engine.beam_search.end(running.beams)
            self._outbox.to_router(attempt_id, running.end(error))

    def end_overdue(self, now: float) -> None:
        for attempt_id in self._deadlines.due(now):
            self.end_attempt(attempt_id, DeadlineExceeded("not finished by its deadline"))

    def _drop_sample(self, running: Running, sample: int) -> None:
        self._engine.sequences.release(running.sequences.pop(sample))
        if not running.sequences:
            self._forget(running.attempt_id)
            self._outbox.to_router(running.attempt_id, running.end())

    def _forget(self, attempt_id: AttemptId) -> None:
        del self._running[attempt_id]
        self._ended.append(attempt_id)
        self._deadlines.discard(attempt_id)
        self._adopted.pop(attempt_id, None)
        self._begin_next.discard(attempt_id)
