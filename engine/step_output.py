"""Applies a step's choices to its sequences: appends tokens, finds which sequences end, and seals full blocks."""

from __future__ import annotations

from collections.abc import Iterator

from baton.sampling import FinishReason
from engine.block_tables import BlockTables
from engine.config import EngineConfig
from engine.forks import Forks
from engine.live_sequences import LiveSequences
from engine.sequence import Sequence, SequenceState
from engine.step import Choice, Chunk, LaunchedStep, SampledToken, StepResult
from engine.token_matcher import TokenMatcher


class StepOutput:
    """Applies the output of a step, chunk by chunk, and records in the step's result what happened."""

    def __init__(self, config: EngineConfig, tables: BlockTables, sequences: LiveSequences, forks: Forks) -> None:
        self._config = config
        self._tables = tables
        self._has_windows = tables.has_windows
        self._sequences = sequences
        self._forks = forks

    def report_prompts(self, step: LaunchedStep, result: StepResult) -> None:
        """Report the logprobs of prompts. Each token's are reported once, even if it is computed again."""
        for seq, piece in step.prompt_logprobs():
            if seq.state is SequenceState.RUNNING:
                assert piece.first_index == seq.num_scored_tokens + 1, f"{seq.attempt_id}: prompt logprobs out of order"
                seq.num_scored_tokens += piece.num_tokens
                result.prompt_logprobs.append((seq, piece))

    def apply(self, chunk: Chunk, choices: list[Choice], result: StepResult) -> None:
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
                self._sequences.release(seq)
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
            if seq.hand_off:
                self._sequences.park_prompt(seq)
            else:
                sampled = self._forks.fork(seq, sampled)
        else:
            sampled = []
            self._settle(chunk, min(chunk.end, len(seq.tokens) - 1))
        if seq.matcher is not None:
            result.failed += [(token.sequence, token.error) for token in sampled if token.error is not None]
            sampled = [token for token in sampled if token.error is None]
        result.sampled += sampled

    def _append(self, chunk: Chunk, choices: list[Choice]) -> list[SampledToken]:
        """The sequence's next tokens, up to the one that ends it: the chosen ones, and those that must follow them."""
        seq, sampled = chunk.sequence, []
        assert len(choices) <= chunk.num_logits, f"{seq.attempt_id}: a step chose tokens that it has no logits of"
        if chunk.num_logits and seq.num_pending_tokens:
            seq.num_pending_tokens -= 1
        if chunk.num_logits > 1:
            seq.draft_tokens = ()  # checked
        for choice in _and_forced(seq, choices):
            sampled.append(self._check_stop(seq, seq.samples[0], choice, seq.matcher))
            seq.tokens.append(choice.token)
            if sampled[-1].finish or sampled[-1].error:
                break
        return sampled

    def _settle(self, chunk: Chunk, num_computed: int) -> None:
        """Count the sequence's first `num_computed` tokens as computed, and seal its full blocks. Its last token counts
        only once its logits have led to a choice. Any KV of the chunk beyond that will be overwritten. Blocks that are
        now behind a window are given back: no launched step reads them, since a step that is launched ahead begins
        where this one ends."""
        seq, block_size = chunk.sequence, self._config.block_size
        self._sequences.seal(seq, seq.block_table, chunk.start // block_size, num_computed // block_size)
        seq.num_computed_tokens = num_computed
        if self._has_windows:
            self._tables.give_back_read(seq, before=chunk.start)
        if num_computed != chunk.end == seq.num_launched_tokens:
            seq.rewind(num_computed)

    def _check_stop(self, seq: Sequence, sample: int, choice: Choice, matcher: TokenMatcher | None) -> SampledToken:
        """The sampled token, with the reason if it ends its sample. matcher: the sample's own, which accepts the
        token."""
        index, token, sampling = seq.num_output_tokens, choice.token, seq.sampling
        finish: FinishReason | None = None
        stop_token_id: int | None = None
        if matcher is not None:
            matcher.accept(token)
        if token in self._config.eos_token_ids and not sampling.ignore_eos:
            finish = FinishReason.STOP
        elif token in sampling.stop_token_ids:
            finish, stop_token_id = FinishReason.STOP, token
        elif matcher is not None and matcher.finished:
            finish = FinishReason.STOP
        elif index + 1 >= sampling.max_tokens or seq.num_tokens + 1 >= self._config.max_model_len:
            finish = FinishReason.LENGTH
        error = matcher.error if matcher is not None else None
        return SampledToken(seq, sample, index, token, choice.logprobs, finish, stop_token_id, error)


def _and_forced(seq: Sequence, choices: list[Choice]) -> Iterator[Choice]:
    """The choices; then, once the sequence's matcher has accepted them, the tokens that must come next. One step
    computes the KV of all of these."""
    yield from choices
    if choices and seq.takes_forced and seq.matcher is not None:
        yield from map(Choice, seq.matcher.forced())
