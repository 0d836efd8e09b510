"""From logits to tokens: applies the sampling parameters on the device, then chooses tokens; the host never waits.

Per choice, in vLLM's order: logprobs of the raw logits; the sequence's logits processors; tokens forbidden that are not
allowed or complete a bad word; logit_bias; EOS and stop ids forbidden while there are fewer than min_tokens outputs;
repetition, frequency and presence penalties; tokens forbidden that the sequence's matcher does not accept; then the
most likely token when greedy, else a draw (see `baton_kernels.sampling`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.sampling import SamplingParams
from baton.top_tokens import MOST_PAIRS
from baton_kernels.sampling import IN_PROMPT, DrawParams, penalize, sample
from baton_kernels.token_mask import apply_token_masks
from engine.model.bad_words import ANY_TOKEN, BadWords
from engine.model.choices import AskedLogprobs, SampleBatch, Sampled
from engine.model.processed_logits import ProcessedLogits
from engine.model.token_bitmask import num_words, pack_bitmask
from engine.model.upload import upload, upload_to
from engine.token_matcher import TokenMatcher

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy, as in vLLM: dividing by them would overflow."""

_INTS = ("seed", "top_k")
_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
"""The sampling parameters that are uploaded for each choice, in the order of the upload."""
_DRAWS, _FILTERED, _BIASED, _PENALIZED, _MASKED, _BAD_WORDS, _NAMES_LOGPROBS = 1, 2, 4, 8, 16, 32, 64
_ADJUSTED = _BIASED | _PENALIZED | _MASKED | _BAD_WORDS
_COMPLETES_BAD_WORD = -1e20
"""Added to a logit. It is finite: if every allowed token completes a bad word, these still rank before tokens that are
not allowed."""
_LEAST_REPETITION = 1e-10
"""Repetition penalties below this count as this. Smaller ones may be 0 in fp32, and 0 times -inf is a NaN; or leave
little of what forbids a bad word."""
_PADDING = 4  # rows of an upload have a multiple of so many columns, so that each is aligned to 16 bytes
_NUM_INTS = 3 + len(_INTS)
_MOST_SIZES = 64
"""Numbers of choices for which tensors are kept: batches grow and shrink by few."""


class Sampler:
    """Chooses tokens for batches of sequences. Each sequence has a row here, from `begin` on for as long as it runs.

    State that depends on tokens which the host may not know yet is on the device: `last_tokens`, [num_rows] int32, the
    last token chosen for each row; and how often each token occurs, [num_rows, vocab_size] int32, valid only for rows
    with penalties. So are the bitmasks of allowed tokens, because of their size, valid only for rows that have them.
    All calls belong to one thread and one stream, and none waits for the device.
    """

    def __init__(self, num_rows: int, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device) -> None:
        self.last_tokens = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._counts = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=device)
        self._allowed = torch.zeros(num_rows, num_words(vocab_size), dtype=torch.int32, device=device)
        self._eos_token_ids = eos_token_ids
        # By row: what is the same at every step of a sequence.
        self._feature_flags = np.zeros(num_rows, np.int64)
        self._may_end_from = np.zeros(num_rows, np.int64)  # the first position where min_tokens forbids nothing
        self._num_logprobs = np.full(num_rows, -1, np.int64)
        self._ints = np.zeros((len(_INTS), num_rows), np.int64)
        self._floats = np.zeros((len(_FLOATS), num_rows), np.float32)
        self._num_prompt_tokens = np.zeros(num_rows, np.int64)
        self._bias = [_NO_ENTRIES] * num_rows
        self._bad_words = [_NO_BAD_WORDS] * num_rows
        self._ends = [_NO_ENTRIES] * num_rows
        self._logprob_tokens: dict[int, tuple[int, ...]] = {}  # by row; of those that name any
        self._unused: dict[int, list[ChoiceTensors]] = {}  # by number of choices

    def begin(self, row: int, params: SamplingParams, prompt_tokens: Seq[int], output_tokens: Seq[int]) -> None:
        """Give the row to a sequence with these tokens. No launched step may still be sampling a token for the row."""
        p = params
        draws = p.temperature >= GREEDY_BELOW
        filtered = draws and bool(p.top_k or p.top_p < 1.0 or p.min_p)
        feature_flags = (
            _DRAWS * draws | _FILTERED * filtered | _BIASED * bool(p.logit_bias) | _PENALIZED * p.has_penalties
        )
        feature_flags |= _MASKED * bool(p.allowed_token_ids) | _BAD_WORDS * bool(p.bad_words_token_ids)
        feature_flags |= _NAMES_LOGPROBS * bool(p.logprob_token_ids)
        self._feature_flags[row] = feature_flags
        self._num_prompt_tokens[row] = len(prompt_tokens)
        self._may_end_from[row] = len(prompt_tokens) + p.min_tokens
        self._num_logprobs[row] = p.num_logprobs
        if p.logprob_token_ids:
            self._logprob_tokens[row] = p.logprob_token_ids
        self._ints[:, row] = p.seed - (1 << 64) if p.seed >> 63 else p.seed, min(p.top_k, self._counts.shape[1])
        self._floats[:, row] = [getattr(p, name) for name in _FLOATS]
        self._floats[_FLOATS.index("temperature"), row] = p.temperature if draws else 0.0
        self._floats[_FLOATS.index("repetition_penalty"), row] = max(p.repetition_penalty, _LEAST_REPETITION)
        self._bias[row] = _entries(list(p.logit_bias), list(p.logit_bias.values()))
        self._bad_words[row] = BadWords(p.bad_words_token_ids) if p.bad_words_token_ids else _NO_BAD_WORDS
        ends = {*p.stop_token_ids, *(() if p.ignore_eos else self._eos_token_ids)} if p.min_tokens else ()
        known = [token for token in ends if token < self._counts.shape[1]]
        self._ends[row] = _entries(known, [-np.inf] * len(known))
        if p.has_penalties:
            self._count_known(row, prompt_tokens, output_tokens)
        if p.allowed_token_ids:
            self._allowed[row] = upload(pack_bitmask(p.allowed_token_ids, self._counts.shape[1]), self._counts.device)

    def prepare(self, batch: SampleBatch) -> SamplingTensors | None:
        """All that `launch` needs for every choice, on the device by one copy; None if there are no choices."""
        if not len(batch.rows):
            return None
        rows, positions = np.asarray(batch.rows, np.int64), np.asarray(batch.positions, np.int64)
        n, (padded, split, num_bytes) = len(rows), _upload_sizes(len(rows))
        packed = np.empty(num_bytes, np.uint8)
        ints = packed[:split].view(np.int64).reshape(_NUM_INTS, padded)[:, :n]
        ints[0], ints[1], ints[2] = batch.logits_rows, rows, positions
        ints[3:] = self._ints[:, rows]
        ints[3] += np.asarray(batch.samples, np.int64)  # wraps, as the 64 bits of a seed do
        packed[split:].view(np.float32).reshape(len(_FLOATS), padded)[:, :n] = self._floats[:, rows]
        uploaded = self._uploaded(packed, n)
        feature_flags = int(np.bitwise_or.reduce(self._feature_flags[rows], initial=0))
        return SamplingTensors(
            uploaded,
            host_rows=rows,
            feature_flags=feature_flags,
            too_short=positions < self._may_end_from[rows],
            bad_words=self._bad_words_of(batch, rows, positions) if feature_flags & _BAD_WORDS else None,
            matchers=batch.matchers,
            processed=ProcessedLogits(batch.to_process) if batch.to_process else None,
        )

    def _bad_words_of(
        self, batch: SampleBatch, rows: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> NDArray[np.int64] | None:
        """Tokens that may complete a bad word, [3, n]: the token's place in the logits of all choices, the token that
        must precede it, and the row. None: there are none."""
        vocab_size = self._counts.shape[1]
        found: list[tuple[int, int, int]] = []
        for i in np.flatnonzero(self._feature_flags[rows] & _BAD_WORDS).tolist():
            row, tokens = int(rows[i]), batch.tokens[i]
            num_unknown = int(positions[i]) - len(tokens)
            forbidden = self._bad_words[row].forbidden(tokens, int(self._num_prompt_tokens[row]), num_unknown)
            found += [(i * vocab_size + token, before, row) for token, before in forbidden]
        return np.array(found, np.int64).T.copy() if found else None

    def launch(self, logits: Tensor, tensors: SamplingTensors | None) -> Sampled:
        """Start to choose. logits: [num_rows, vocab_size], bf16 or fp32 (computed in fp32), not changed."""
        assert logits.shape[1] == self._counts.shape[1]
        if tensors is None:
            return Sampled(self.last_tokens[:0])
        own, own_rows = self._adjusted(logits, tensors)
        draw = tensors.uploaded.draw if tensors.feature_flags & _DRAWS else None
        tokens = sample(own, own_rows, draw, filtered=bool(tensors.feature_flags & _FILTERED))
        rows = tensors.uploaded.rows
        self.last_tokens.index_copy_(0, rows, tokens)
        if tensors.feature_flags & _PENALIZED:  # harmless for other rows: `begin` clears a row that gets penalties
            places = rows * self._counts.shape[1] + tokens
            self._counts.view(-1).scatter_add_(0, places, torch.ones_like(tokens))
        sampled = self._with_logprobs(logits, tensors, tokens)
        sampled.processed = tensors.processed
        self._unused.setdefault(len(tokens), []).append(tensors.uploaded)
        if len(self._unused) > _MOST_SIZES:
            del self._unused[next(iter(self._unused))]
        return sampled

    def _uploaded(self, packed: NDArray[np.uint8], num_choices: int) -> ChoiceTensors:
        unused = self._unused.get(num_choices)
        own = unused.pop() if unused else ChoiceTensors(num_choices, self._counts.device)
        own.overwrite(packed)
        return own

    def _count_known(self, row: int, prompt_tokens: Seq[int], output_tokens: Seq[int]) -> None:
        counts = self._counts[row].zero_()
        known = upload(np.array([*prompt_tokens, *output_tokens], np.int64), counts.device)
        prompt, output = known[: len(prompt_tokens)], known[len(prompt_tokens) :]
        counts.index_fill_(0, prompt, IN_PROMPT)
        counts.scatter_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def _adjusted(self, logits: Tensor, tensors: SamplingTensors) -> tuple[Tensor, Tensor]:
        """Logits after processors, bias, masks and penalties, and the row of each choice in them; `logits` itself if no
        choice has any of these."""
        others = tensors.matchers or tensors.processed is not None
        if not (tensors.feature_flags & _ADJUSTED or tensors.too_short.any() or others):
            return logits, tensors.uploaded.logits_rows
        own = logits.index_select(0, tensors.uploaded.logits_rows).float()
        if tensors.processed is not None:
            tensors.processed.run(own)
        self._forbid(own, tensors)
        rows = tensors.host_rows.tolist()
        added = [(i, self._bias[row]) for i, row in enumerate(rows)] if tensors.feature_flags & _BIASED else []
        added += [(i, self._ends[rows[i]]) for i in np.flatnonzero(tensors.too_short).tolist()]
        if added:
            places = np.concatenate([tokens + i * own.shape[1] for i, (tokens, _) in added])
            values = np.concatenate([values for _, (_, values) in added])
            own.view(-1).scatter_add_(0, upload(places, own.device), upload(values, own.device))
        if tensors.feature_flags & _PENALIZED:
            penalize(own, self._counts, tensors.uploaded.rows, *tensors.uploaded.penalties)
        if tensors.matchers:
            self._constrain(own, tensors.matchers)
        return own, torch.arange(own.shape[0], device=own.device)

    def _forbid(self, own: Tensor, tensors: SamplingTensors) -> None:
        """Apply allowed tokens and bad words to the logits of all choices, in place."""
        if tensors.feature_flags & _MASKED:
            choices = np.flatnonzero(self._feature_flags[tensors.host_rows] & _MASKED)
            masks = self._allowed.index_select(0, upload(tensors.host_rows[choices], own.device))
            apply_token_masks(own, upload(choices, own.device), masks)
        if tensors.bad_words is not None:
            places, before, of_rows = upload(tensors.bad_words, own.device).unbind()
            completes = (before == ANY_TOKEN) | (before == self.last_tokens.index_select(0, of_rows))
            own.view(-1).scatter_add_(0, places, completes.float() * _COMPLETES_BAD_WORD)

    def _constrain(self, own: Tensor, matchers: Seq[tuple[int, TokenMatcher]]) -> None:
        """Forbid what the matchers do not accept. own: [num_choices, vocab_size]. On a GPU, the forward runs while the
        host fills the masks."""
        masks = np.zeros((len(matchers), num_words(own.shape[1])), np.int32)
        for mask, (_, matcher) in zip(masks, matchers, strict=True):
            matcher.fill(mask)
        choices = np.array([choice for choice, _ in matchers], np.int64)
        apply_token_masks(own, upload(choices, own.device), upload(masks, own.device))

    def _with_logprobs(self, logits: Tensor, tensors: SamplingTensors, tokens: Tensor) -> Sampled:
        num_logprobs = self._num_logprobs[tensors.host_rows]
        asked = np.flatnonzero(num_logprobs >= 0)
        if not asked.size:
            return Sampled(tokens)
        few = num_logprobs[asked] <= MOST_PAIRS  # these need not wait until whole vocabularies are sorted and copied
        groups = (asked,) if few.all() else (asked[few], asked[~few])
        return Sampled(tokens, [self._logprobs_of(group, logits, tensors, tokens) for group in groups if group.size])

    def _logprobs_of(
        self, asked: NDArray[np.int64], logits: Tensor, tensors: SamplingTensors, tokens: Tensor
    ) -> AskedLogprobs:
        """What the choices `asked` ask for."""
        num_logprobs = self._num_logprobs[tensors.host_rows[asked]]
        picked = upload(asked, logits.device)
        own = logits.index_select(0, tensors.uploaded.logits_rows.index_select(0, picked))
        logprobs = own.float().log_softmax(dim=-1)
        chosen = logprobs.gather(1, tokens.index_select(0, picked).long()[:, None])[:, 0]
        values, ids = logprobs.topk(min(int(num_logprobs.max()), logits.shape[1]), dim=-1)
        if tensors.feature_flags & _NAMES_LOGPROBS:
            self._name(tensors.host_rows[asked], logprobs, values, ids)
        asks = list(zip(asked.tolist(), num_logprobs.tolist(), strict=True))
        return AskedLogprobs(asks, chosen, values, ids)

    def _name(self, rows: NDArray[np.int64], logprobs: Tensor, values: Tensor, ids: Tensor) -> None:
        """Put the tokens that a row's sequence names, with their logprobs, in place of the most likely ones. rows: of
        the logprobs, [n, vocab_size]; values, ids: [n, k], with k tokens or more than any row names."""
        naming = np.flatnonzero(self._feature_flags[rows] & _NAMES_LOGPROBS)
        if not naming.size:
            return
        named = np.zeros((len(naming), ids.shape[1]), np.int64)
        for own, row in zip(named, rows[naming].tolist(), strict=True):
            own[: len(self._logprob_tokens[row])] = self._logprob_tokens[row]
        choices, tokens = upload(naming, ids.device), upload(named, ids.device)
        ids[choices] = tokens
        values[choices] = logprobs.index_select(0, choices).gather(1, tokens)


class ChoiceTensors:
    """What the choices of a step need on the device, [num_choices] each: views of one upload, which take longer to make
    than the upload, and are therefore used again.

    draw: the sampling parameters. penalties: repetition, frequency, presence.
    """

    def __init__(self, num_choices: int, device: torch.device) -> None:
        padded, split, num_bytes = _upload_sizes(num_choices)
        self._packed = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        ints = self._packed[:split].view(torch.int64).view(-1, padded)[:, :num_choices]
        floats = self._packed[split:].view(torch.float32).view(-1, padded)[:, :num_choices]
        self.logits_rows, self.rows, position, seed, top_k = ints.unbind()
        temperature, top_p, min_p, *self.penalties = floats.unbind()
        self.draw = DrawParams(temperature, top_k, top_p, min_p, seed, position)

    def overwrite(self, packed: NDArray[np.uint8]) -> None:
        """packed: what `Sampler.prepare` packs. Steps launched before read what was there before."""
        if self._packed.is_cuda:
            upload_to(self._packed, packed)
        else:
            self._packed.numpy()[:] = packed


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """The sampling parameters of a step's choices, on the device; and what the host has to know about them."""

    uploaded: ChoiceTensors

    host_rows: NDArray[np.int64]
    feature_flags: int  # everything that any of the choices needs
    too_short: NDArray[np.bool_]  # has fewer than min_tokens outputs
    bad_words: NDArray[np.int64] | None
    matchers: Seq[tuple[int, TokenMatcher]]
    processed: ProcessedLogits | None


def _upload_sizes(num_choices: int) -> tuple[int, int, int]:
    """Of what `Sampler.prepare` packs: columns, bytes of the integers, and bytes in all."""
    padded = -(-num_choices // _PADDING) * _PADDING
    split = _NUM_INTS * 8 * padded
    return padded, split, split + len(_FLOATS) * 4 * padded


_Entries = tuple[NDArray[np.int64], NDArray[np.float32]]  # token ids, and what to add to their logits


def _entries(tokens: Seq[int], values: Seq[float]) -> _Entries:
    return np.array(tokens, np.int64), np.array(values, np.float32)


_NO_ENTRIES = _entries((), ())
_NO_BAD_WORDS = BadWords(())
