"""Tokens that a matcher leaves no alternative to are taken without a step each, and nothing else changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from baton.messages import AttemptId
from baton.sampling import FinishReason, SamplingParams
from engine.config import EngineConfig
from engine.engine import Engine
from engine.logits_processor import LogitsProcessorChain
from engine.model.load import loader
from engine.model.load.checkpoint import Checkpoint
from engine.model.runner import TorchModelRunner
from engine.prompt_budget import LEAST_CHUNK
from engine.sequence import Sequence
from tests.engine import tiny_models
from tests.engine.counting import make, run, sequence

torch.set_num_threads(1)

FREE = frozenset(range(3, 90))


class Places:
    """Allows these tokens at each place of the output. jumps: whether it says so where there is but one."""

    ready = True

    def __init__(self, allowed: Seq[frozenset[int]], jumps: bool = True, tokens: Iterable[int] = ()) -> None:
        self.allowed = allowed
        self.jumps = jumps
        self.tokens = list(tokens)

    @property
    def error(self) -> str | None:
        wrong = [t for t, allowed in zip(self.tokens, self.allowed, strict=False) if t not in allowed]
        return f"wrong: {wrong}" if wrong else None

    @property
    def finished(self) -> bool:
        return len(self.tokens) >= len(self.allowed)

    def accept(self, token: int) -> None:
        self.tokens.append(token)

    def forced(self) -> list[int]:
        run = list[int]()
        for allowed in self.allowed[len(self.tokens) :] if self.jumps else ():
            if len(allowed) > 1:
                break
            run += allowed
        return run

    def fork(self, tokens: Iterable[int] = ()) -> Places:
        return Places(self.allowed, self.jumps, [*self.tokens, *tokens])

    def fill(self, mask: NDArray[np.int32]) -> None:
        for token in self.allowed[len(self.tokens)]:
            mask.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)


def only(*tokens: int) -> list[frozenset[int]]:
    return [frozenset({token}) for token in tokens]


ALLOWED = [*[FREE] * 2, *only(40, 41, 42), FREE, *only(43), *[FREE] * 20]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_forced_run_is_the_input_of_one_step(ahead: bool) -> None:
    engine, model = make(async_scheduling=ahead)
    engine.add(seq := sequence(5, max_tokens=9, matcher=Places(ALLOWED)))
    tokens = [token for result in run(engine) for token in result.sampled]
    assert [token.token for token in tokens] == [10, 11, 40, 41, 42, 15, 43, 17, 18]
    assert [token.index for token in tokens] == list(range(9))
    assert [token.finish for token in tokens] == [None] * 8 + [FinishReason.LENGTH]
    lengths = [chunk.length for batch in model.batches for chunk in batch if chunk.sequence is seq]
    assert lengths == [5, 1, 4, 2, 1]
    assert isinstance(seq.matcher, Places)
    assert seq.matcher.tokens == [token.token for token in tokens]


@pytest.mark.parametrize(
    ("ends", "said", "finish"),
    [
        ({"max_tokens": 4}, [10, 11, 40, 41], FinishReason.LENGTH),
        ({"max_tokens": 9, "stop_token_ids": frozenset({41})}, [10, 11, 40, 41], FinishReason.STOP),
    ],
)
def test_a_run_ends_with_its_sequence(ends: dict[str, Any], said: list[int], finish: FinishReason) -> None:
    engine, _ = make()
    engine.add(sequence(5, matcher=Places(ALLOWED), **ends))
    tokens = [token for result in run(engine) for token in result.sampled]
    assert [token.token for token in tokens] == said
    assert [token.finish for token in tokens] == [None] * (len(said) - 1) + [finish]
    assert engine.blocks.num_free + engine.blocks.num_cached == engine.blocks.num_total


@pytest.mark.parametrize(
    "wish",
    [
        {"num_logprobs": 0},
        {"presence_penalty": 0.5},
        {"min_tokens": 2},
        {"bad_words_token_ids": ((7, 8),)},
        {"allowed_token_ids": frozenset({40})},
        {"processors": LogitsProcessorChain([("unchanged", lambda output, logits: logits)])},
    ],
)
def test_what_needs_the_sampler_s_part_is_sampled(wish: dict[str, Any]) -> None:
    engine, model = make()
    engine.add(sequence(5, max_tokens=6, matcher=Places(ALLOWED), **wish))
    run(engine)
    assert [chunk.length for batch in model.batches for chunk in batch] == [5, *[1] * 5]


@pytest.mark.parametrize("target_itl_s", [None, 1e-9])
def test_forced_tokens_wait_neither_for_a_prompt_nor_for_the_target(target_itl_s: float | None) -> None:
    """Though a prompt that came earlier takes what the budget leaves. It goes on, too."""
    engine, model = make(num_blocks=400, max_model_len=800, max_num_batched_tokens=50, target_itl_s=target_itl_s)
    engine.add(prompt := sequence(700, first=0, max_tokens=1))
    engine.compute(engine.schedule(0.0))
    for first in (100, 200):  # as from a prefill node
        stream = sequence(5, first=first, max_tokens=9, matcher=Places(ALLOWED))
        stream.block_table = engine.allocate(2)
        engine.adopt(stream, {0: (10,)}, [])
    while engine.num_running > 1:
        engine.compute(engine.schedule(0.0))
        engine.check_integrity()
    steps = model.batches[1:]
    others = [[chunk.length for chunk in batch if chunk.sequence is not prompt] for batch in steps]
    assert others == [[1, 1], [4, 4], [2, 2], [1, 1]]
    assert all(len(batch) == 3 for batch in steps), "the prompt waits"
    assert all(sum(chunk.length for chunk in batch if not chunk.is_decode) <= 50 for batch in steps)


def test_what_a_stream_computes_again_is_computed_as_a_prompt() -> None:
    engine, model = make(num_blocks=400, max_model_len=800, target_itl_s=1e-9)
    engine.add(sequence(5, max_tokens=20))
    engine.compute(engine.schedule(0.0))
    engine.add(seq := sequence(2, output=range(98), max_tokens=200))
    while not seq.num_output_tokens > 98:
        engine.compute(engine.schedule(0.0))
    lengths = [chunk.length for batch in model.batches for chunk in batch if chunk.sequence is seq]
    assert lengths == [LEAST_CHUNK] * 3 + [4]


# ---- with a model ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tiny_models.CONFIGS["llama"], tmp_path_factory.mktemp("llama"))


WISHES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.9, "top_p": 0.95, "seed": 5},
    "biased": {"temperature": 1.0, "logit_bias": {41: -100.0}},
    "forks": {"temperature": 0.9, "seed": 8},
}
Said = dict[tuple[str, int], list[tuple[int, int, FinishReason | None]]]


def say(folder: Path, jumps: bool, num_blocks: int) -> tuple[Said, int, set[int]]:
    """What a model says to WISHES, how many sequences were preempted, and how many tokens a turn gave a sequence."""
    config = EngineConfig(
        num_blocks=num_blocks,
        max_model_len=96,
        vocab_size=tiny_models.VOCAB_SIZE,
        eos_token_ids=(tiny_models.EOS,),
        max_num_batched_tokens=20,
        async_scheduling=True,
    )
    engine = Engine(config, TorchModelRunner(loader.load_model(Checkpoint.open(folder), device="cpu"), config))
    for number, (name, wishes) in enumerate(WISHES.items()):
        prompt = tuple((7 * i + number) % tiny_models.VOCAB_SIZE for i in range(30 + number))
        sampling = SamplingParams(max_tokens=24, **wishes)
        samples = [0, 1] if name == "forks" else [0]
        matcher = Places(ALLOWED, jumps)
        engine.add(Sequence(AttemptId(1, name, 0), samples, prompt, sampling, arrived_s=float(number), matcher=matcher))
    said: Said = {}
    together = set[int]()
    while engine.has_work:
        result = engine.compute(engine.schedule(0.0))
        engine.check_integrity()
        for token in result.sampled:
            key = token.sequence.attempt_id.request_id, token.sample
            said.setdefault(key, []).append((token.index, token.token, token.finish))
        together |= set(Counter(id(token.sequence) for token in result.sampled).values())
        assert not result.failed
    return said, engine.num_preemptions, together


@pytest.mark.parametrize("num_blocks", [200, 8])
def test_a_model_says_the_same_whether_forced_tokens_are_sampled_or_not(folder: Path, num_blocks: int) -> None:
    stepped, _, singles = say(folder, jumps=False, num_blocks=200)
    jumped, num_preemptions, together = say(folder, jumps=True, num_blocks=num_blocks)
    assert jumped == stepped
    assert singles == {1}
    assert together == {1, 2, 4}
    assert bool(num_preemptions) == (num_blocks < 200)


@pytest.mark.parametrize("jumps", [False, True])
def test_a_processor_sees_what_comes_before_each_token(folder: Path, jumps: bool) -> None:
    """Also where the matcher leaves no alternative: the processor may fail, or forbid the token."""
    seen = list[list[int]]()

    def watch(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(output)
        return logits

    config = EngineConfig(num_blocks=20, max_model_len=96, vocab_size=tiny_models.VOCAB_SIZE)
    engine = Engine(config, TorchModelRunner(loader.load_model(Checkpoint.open(folder), device="cpu"), config))
    seq = sequence(5, max_tokens=7, matcher=Places(ALLOWED, jumps), processors=LogitsProcessorChain([("watch", watch)]))
    engine.add(seq)
    run(engine)
    assert seq.output_tokens[2:5] == (40, 41, 42)
    assert seen == [list(seq.output_tokens[:length]) for length in range(7)]
