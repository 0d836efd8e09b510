"""A model without arithmetic whose KV can be read back: a wrong, stale or misplaced block is seen at once.

The KV of a token is (head, layer, position, token), in each layer, of NUM_HEADS heads. Computing a chunk
first checks, layer by layer, that the blocks hold exactly the KV of all earlier positions, then writes its own. The
next token is a hash of the whole context and the seed.
"""

from __future__ import annotations

import functools
import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import torch

from baton.kv_groups import group_layers
from baton.layout import KvLayout, KvSlice, LayerKv, num_blocks_for
from baton.messages import TokenLogprobs
from baton.prompt_logprobs import PromptLogprobs
from baton.sampling import FinishReason, SamplingParams
from baton.table_shape import TableShape
from engine.block_manager import BlockManager
from engine.sequence import Sequence as EngineSequence
from engine.step import Begun, Choice, Chunk
from tests.engine.counting import piece_of

VOCAB_SIZE = 97
EOS = 1
NUM_LAYERS = 2
NUM_HEADS = 2
HEADS = torch.arange(NUM_HEADS) * 10**9
"""Tells a head's KV from another's."""


def next_token(tokens: Sequence[int], seed: int, min_tokens_left: bool = False) -> int:
    digest = hashlib.sha256(repr((list(tokens), seed)).encode()).digest()
    token = digest[0] % VOCAB_SIZE
    return 2 if token == EOS and min_tokens_left else token


def expected_output(
    prompt: Sequence[int], sampling: SamplingParams, sample: int, max_model_len: int
) -> tuple[list[int], FinishReason]:
    """What an undisturbed run of one sample gives."""
    tokens = list(prompt)
    while True:
        tokens.append(next_token(tokens, sampling.seed + sample))
        output = tokens[len(prompt) :]
        if (tokens[-1] == EOS and not sampling.ignore_eos) or tokens[-1] in sampling.stop_token_ids:
            return output, FinishReason.STOP
        if len(output) >= sampling.max_tokens or len(tokens) >= max_model_len:
            return output, FinishReason.LENGTH


def most_likely(tokens: Sequence[int], num: int) -> tuple[tuple[int, float], ...]:
    """The next tokens with their logprobs, best first; EOS is often among them."""
    random = Random(repr(list(tokens)))
    chosen = random.sample(range(2, VOCAB_SIZE), num)
    if random.random() < 0.3:
        chosen[random.randrange(num)] = EOS
    return tuple(zip(chosen, sorted((-3 * random.random() for _ in chosen), reverse=True), strict=True))


def choose(tokens: Sequence[int], chunk: Chunk) -> list[Choice]:
    """What follows the sequence's tokens: `tokens` are those, and the chunk's draft tokens, of which the ones that are
    right make one more choice each."""
    seed, samples = chunk.sequence.sampling.seed, chunk.sequence.samples
    if chunk.sequence.beams is not None:
        return [Choice(0, TokenLogprobs(0.0, most_likely(tokens, chunk.sequence.sampling.num_logprobs)))]
    if chunk.num_logits == 1:
        return [Choice(next_token(tokens, seed + sample)) for sample in samples]
    choices = list[Choice]()
    for end in range(len(tokens) - chunk.num_logits + 1, len(tokens) + 1):
        choices.append(Choice(next_token(tokens[:end], seed + samples[0])))
        if end < len(tokens) and tokens[end] != choices[-1].token:
            break
    return choices


class Work(deque[Callable[[], None]]):
    """What is launched and has not happened, in order."""

    num_done = 0

    def advance(self) -> None:
        """The next piece happens."""
        piece = self.popleft()
        self.num_done += 1
        piece()


class FakeStep:
    """Implements `engine.step.LaunchedStep`."""

    def __init__(self, queue: Work, num_chunks: int, num_layers: int) -> None:
        self._queue = queue
        self._num_chunks = num_chunks
        self._num_layers = num_layers
        self.num_written = 0  # chunks, each once for each layer
        self.choices: list[list[Choice]] = []
        self.scored: list[tuple[EngineSequence, PromptLogprobs]] = []

    def is_done(self) -> bool:
        return self.num_layers_done() == self._num_layers

    def num_layers_done(self) -> int:
        return self.num_written // self._num_chunks

    def wait(self) -> list[list[Choice]]:
        while not self.is_done():
            self._queue.advance()
        return self.choices

    def prompt_logprobs(self) -> list[tuple[EngineSequence, PromptLogprobs]]:
        return self.scored


class FakeModel:
    """Implements `engine.step.ModelRunner` over a pool of `[num_blocks, layers of a block, heads held, block_size]`
    int64 for each of its `ranks`; none: one holds everything.

    It computes as late as it may: what is launched happens when a step is waited for, or by `advance`, in order. So a
    block that is used again too early is overwritten by a step that still names it. With `blocks`, those of its engine,
    it also asserts that every block of a step still has an owner. `windows`: of its layers; where one has a window, it
    checks what attention would see, and layers may be in several groups.
    """

    only_launches = True
    blocks: BlockManager | None = None
    chooses_nothing: Callable[[], bool] = staticmethod(lambda: False)
    """Asked at each sampling chunk: whether its sequence sits this one out."""
    fails: Callable[[EngineSequence], bool] = staticmethod(lambda sequence: False)
    """Asked likewise: whether its sequence must end instead."""
    most_unknown = 1
    """How many tokens of a sequence launched steps may sample before the host knows the first of them."""
    lied_to: frozenset[int] = frozenset()
    """Routers whose work may come with KV that is not of its tokens: whoever sent it is no good."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        ranks: tuple[KvSlice, ...] = (),
        windows: tuple[int | None, ...] = (None,) * NUM_LAYERS,
    ) -> None:
        layers = tuple(LayerKv(NUM_HEADS, 1, 0, "int64", window) for window in windows)
        self.layout = KvLayout(layers, block_size, "fake", ranks, group_layers(layers))
        self.shape = TableShape(block_size, self.layout.windows)
        self.num_layers = len(layers)
        self.block_size = block_size
        self._places = {  # of each layer: its group, and which of the block's layers it is
            layer: (group, index)
            for group, members in enumerate(self.layout.layers_of_groups)
            for index, layer in enumerate(members)
        }
        self._runs = [self.layout.runs_of(held) for held in self.layout.ranks]
        self._pools = [
            torch.full((num_blocks, max(map(len, runs)), held.num_heads, block_size), -1, dtype=torch.int64)
            for held, runs in zip(self.layout.ranks, self._runs, strict=True)
        ]
        self._queue = Work()
        self._last_tokens: dict[tuple[EngineSequence, int], int] = {}  # by position

    @property
    def pool_bytes(self) -> torch.Tensor:
        """Of the first rank."""
        return self.rank_bytes(0)

    def rank_bytes(self, rank: int) -> torch.Tensor:
        """[num_blocks, bytes of a block on that rank], uint8: the same memory."""
        pool = self._pools[rank]
        return pool.view(len(pool), -1).view(torch.uint8)

    def write(self, block: int, layer: int, slot: int, value: int) -> None:
        """The KV of a token, on all ranks."""
        group, index = self._places[layer]
        for held, runs, pool in zip(self.layout.ranks, self._runs, self._pools, strict=True):
            if index in runs[group]:
                pool[block, index - runs[group].start, :, slot] = value + HEADS[held.head_start : held.head_end]

    @property
    def is_busy(self) -> bool:
        """Whether something launched has not happened."""
        return bool(self._queue)

    def advance(self) -> None:
        """The next piece of work happens: a layer of a chunk, or a copy."""
        self._queue.advance()

    def enqueue(self, piece: Callable[[], None]) -> None:
        """Have something happen behind all that is launched so far."""
        self._queue.append(piece)

    def mark(self) -> int:
        """All that is launched so far, for `reach`."""
        return self._queue.num_done + len(self._queue)

    def reach(self, mark: int) -> None:
        """What the mark stands for happens, if it has not yet."""
        while self._queue.num_done < mark:
            self.advance()

    def launch(self, chunks: Sequence[Chunk], begun: Begun = lambda waited_s: None) -> FakeStep:
        step = FakeStep(self._queue, len(chunks), self.num_layers)
        step.scored = [(chunk.sequence, piece_of(chunk)) for chunk in chunks if chunk.scored_positions]
        own = [
            (chunk, [*chunk.sequence.tokens, *chunk.draft_tokens], list(chunk.sequence.block_table)) for chunk in chunks
        ]
        for layer in range(self.num_layers):
            self._queue += [functools.partial(self._layer, step, layer, *inputs) for inputs in own]
        begun(0.0)
        return step

    def _layer(self, step: FakeStep, layer: int, chunk: Chunk, tokens: list[int], table: list[int]) -> None:
        choices = self._compute(layer, chunk, list(tokens), table)
        step.num_written += 1
        if layer == self.num_layers - 1:
            step.choices.append(choices)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        def copy() -> None:
            for source, target in pairs:
                for pool in self._pools:
                    pool[target] = pool[source]

        self._queue.append(copy)

    def forget(self, sequence: EngineSequence) -> None:
        pass  # a launched step may still ask for its last token

    def _compute(self, layer: int, chunk: Chunk, tokens: list[int], table: list[int]) -> list[Choice]:
        seq = chunk.sequence
        assert chunk.end <= len(tokens) + self.most_unknown, f"{seq.attempt_id}: too much is not known to the host"
        while len(tokens) < chunk.end:
            tokens.append(self._last_tokens[seq, len(tokens)])
        group, window = self._places[layer][0], self.layout.layers[layer].sliding_window
        table = table[group :: self.shape.width]
        seen_from = 0 if window is None else max(0, chunk.start + 1 - window)
        if self.blocks is not None:
            named = table[seen_from // self.block_size : num_blocks_for(chunk.end, self.block_size)]
            assert all(map(self.blocks.num_owners, named)), f"{seq.attempt_id}: a block was lost under a step"
        want = torch.tensor([self._kv(layer, p, t) for p, t in enumerate(tokens[: chunk.start])], dtype=torch.int64)
        have = self._slots(table, layer, chunk.start)
        if seq.attempt_id.router_epoch not in self.lied_to:
            same = torch.equal(have[:, seen_from:], (want + HEADS[:, None])[:, seen_from:])
            assert same, f"{seq.attempt_id}: wrong KV at a position"
        for position in range(chunk.start, chunk.end):
            block, slot = table[position // self.block_size], position % self.block_size
            self.write(block, layer, slot, self._kv(layer, position, tokens[position]))
        if not chunk.samples_token or layer < self.num_layers - 1:
            return []
        assert chunk.end == len(tokens)
        choices = choose(tokens, chunk)
        self._last_tokens[seq, chunk.end] = choices[-1].token
        if self.fails(seq):
            return [replace(choice, failure="it must end") for choice in choices]
        return [] if self.chooses_nothing() else choices

    @staticmethod
    def _kv(layer: int, position: int, token: int) -> int:
        return (layer * 1000 + position) * 1000 + token

    def _slots(self, table: list[int], layer: int, num_tokens: int) -> torch.Tensor:
        """[NUM_HEADS, num_tokens]: what the ranks have."""
        group, index = self._places[layer]
        have = torch.full((NUM_HEADS, num_tokens), -1, dtype=torch.int64)
        for held, runs, pool in zip(self.layout.ranks, self._runs, self._pools, strict=True):
            if index in runs[group]:
                blocks = pool[torch.tensor(table, dtype=torch.int64), index - runs[group].start]
                have[held.head_start : held.head_end] = blocks.transpose(0, 1).flatten(1)[:, :num_tokens]
        return have
