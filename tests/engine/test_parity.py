"""The whole engine, with a real (tiny, random) model: the same tokens as transformers' generate, whatever the batch,
the chunks, the prefix cache, preemption and handoff do."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.messages import AttemptId
from baton.sampling import FinishReason, SamplingParams
from baton_kernels.block_copy import gather_blocks, scatter_blocks
from engine.config import EngineConfig
from engine.engine import Engine
from engine.model.graphs import MAX_PROMPTS, decode_capture_sizes
from engine.model.load import loader
from engine.model.load.checkpoint import Checkpoint
from engine.model.runner import TorchModelRunner
from engine.sequence import Sequence
from engine.step import SampledToken
from engine.step_padding import StepPadding
from tests.engine import tiny_models

torch.set_num_threads(1)

MAX_TOKENS = 14
Outputs = dict[tuple[str, int], list[int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tiny_models.CONFIGS["llama"], tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    """1 to 400 tokens, log-uniform; several share a beginning."""
    rng = random.Random(5)
    shared = [rng.randrange(tiny_models.VOCAB_SIZE) for _ in range(200)]
    result = []
    for i in range(16):
        length = round(400 ** (i / 15))
        fresh = [rng.randrange(tiny_models.VOCAB_SIZE) for _ in range(length)]
        num_shared = min(length - 1, 200) if i % 3 == 0 else 0
        result.append(tuple(shared[:num_shared] + fresh[num_shared:]))
    return result


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """Greedy answers of transformers, each prompt alone."""
    model: Any = tiny_models.reference(folder)
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        done = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MAX_TOKENS)
        answers.append(done[0, len(prompt) :].tolist())
    return answers


def make_engine(folder: Path, device: str = "cpu", **sizes: Any) -> tuple[Engine, TorchModelRunner]:
    plain: dict[str, Any] = {"num_blocks": 400, "max_model_len": 512, "block_size": 16, **sizes}
    config = EngineConfig(vocab_size=tiny_models.VOCAB_SIZE, eos_token_ids=(tiny_models.EOS,), **plain)
    runner = TorchModelRunner(loader.load_model(Checkpoint.open(folder), device=device), config)
    return Engine(config, runner), runner


def ask(name: str, prompt: tuple[int, ...], samples: int = 1, hand_off: bool = False, **sampling: object) -> Sequence:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": MAX_TOKENS, **sampling})  # type: ignore[arg-type]
    return Sequence(AttemptId(1, name, 0), list(range(samples)), prompt, params, hand_off=hand_off)


def run(engine: Engine, seqs: Iterable[Sequence] = ()) -> Outputs:
    """What was said by the time that nothing is left to do; checks indexes and blocks on the way."""
    for seq in seqs:
        engine.add(seq)
    said: Outputs = defaultdict(list)
    for step in range(5000):
        result = engine.compute(engine.schedule(0.0))
        for token in result.sampled:
            said[token.sequence.attempt_id.request_id, token.sample].append(token.token)
        done = not engine.has_work and not result.again
        if done or step % 8 == 0:  # a recount of all blocks takes longer than a step
            engine.check_integrity()
        if done:
            return said
    raise AssertionError("the engine does not come to an end")


@pytest.mark.parametrize(
    ("budget", "block_size", "ahead"),
    [(7, 4, False), (7, 16, True), (64, 4, True), (64, 16, False), (2048, 4, False), (2048, 16, True)],
)
def test_mixed_batches_and_prefix_hits(
    folder: Path, prompts: list[tuple[int, ...]], expected: list[list[int]], budget: int, block_size: int, ahead: bool
) -> None:
    sizes: dict[str, Any] = {
        "max_num_batched_tokens": budget,
        "num_blocks": 6400 // block_size,
        "block_size": block_size,
    }
    engine, _ = make_engine(folder, **sizes, async_scheduling=ahead)
    for turn in range(2):
        seqs = [ask(str(i), prompt) for i, prompt in enumerate(prompts)]
        said = run(engine, seqs)
        assert [said[str(i), 0] for i in range(len(prompts))] == expected
        if turn:
            assert [s.num_cached_tokens for s in seqs] == [(len(p) - 1) // block_size * block_size for p in prompts]


@pytest.mark.parametrize("sizes", [(), (3, 20)])
def test_chunks_bounded_by_time_say_the_same(
    folder: Path, prompts: list[tuple[int, ...]], expected: list[list[int]], sizes: tuple[int, ...]
) -> None:
    """The target is so short that every prompt beside a stream gets least chunks."""
    engine, _ = make_engine(folder, target_itl_s=1e-9, padding=StepPadding(((32, sizes),) if sizes else ()))
    said = run(engine, [ask(str(i), prompt) for i, prompt in enumerate(prompts)])
    assert [said[str(i), 0] for i in range(len(prompts))] == expected


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("ahead", [True, False])
def test_a_gpu_says_the_same(
    folder: Path, prompts: list[tuple[int, ...]], expected: list[list[int]], ahead: bool, graphs: bool
) -> None:
    config: dict[str, Any] = {"max_num_batched_tokens": 100, "async_scheduling": ahead}
    if graphs:
        config["padding"] = StepPadding(((0, (32, 64, 100)), (32, (32, 100))), MAX_PROMPTS)
    engine, runner = make_engine(folder, device="cuda", **config)
    assert runner.pool.tensor.is_cuda
    if graphs:
        runner.capture(decode_capture_sizes(engine.config.max_num_seqs), 512)
    wishes: dict[str, Any] = {
        "temperature": 0.9,
        "top_p": 0.95,
        "num_logprobs": 2,
        "repetition_penalty": 1.1,
        "min_tokens": 3,
    }
    seqs = [ask(str(i), prompt) for i, prompt in enumerate(prompts)]
    said = run(engine, [*seqs, *(ask(f"drawn {i}", prompt, 3, **wishes) for i, prompt in enumerate(prompts))])
    assert [said[str(i), 0] for i in range(len(prompts))] == expected
    drawn = run(make_engine(folder)[0], [ask(f"drawn {i}", prompt, 3, **wishes) for i, prompt in enumerate(prompts)])
    same = sum(said[key] == output for key, output in drawn.items())
    assert same >= len(drawn) - 2  # noise is equal up to the rounding of logarithms


def test_preemption_and_eviction(folder: Path, prompts: list[tuple[int, ...]], expected: list[list[int]]) -> None:
    """Answers go on after EOS, so that blocks get short whatever they say."""
    engine, _ = make_engine(folder, num_blocks=34, max_num_batched_tokens=100)
    seqs = [ask(str(i), prompt, ignore_eos=True) for i, prompt in enumerate(prompts)]
    preempted = 0
    said: Outputs = defaultdict(list)
    for seq in seqs:
        engine.add(seq)
    while engine.has_work:
        plan = engine.schedule(0.0)
        result = engine.compute(plan)
        preempted += len(plan.preempted)
        for token in result.sampled:
            said[token.sequence.attempt_id.request_id, 0].append(token.token)
    assert preempted
    assert all(len(said[str(i), 0]) == MAX_TOKENS for i in range(len(prompts)))
    assert [said[str(i), 0][: len(answer)] for i, answer in enumerate(expected)] == expected


def test_an_attempt_goes_on_where_another_ended(
    folder: Path, prompts: list[tuple[int, ...]], expected: list[list[int]]
) -> None:
    engine, _ = make_engine(folder)
    seqs = []
    for i, (prompt, answer) in enumerate(zip(prompts, expected, strict=True)):
        seq = ask(str(i), prompt)
        seq.tokens.extend(answer[: min(5, len(answer) - 1)])
        seqs.append(seq)
    said = run(engine, seqs)
    assert [said[str(i), 0] for i in range(len(prompts))] == [answer[min(5, len(answer) - 1) :] for answer in expected]


@pytest.mark.parametrize("length", [1, 31, 32, 100])
def test_seeded_samples_are_those_of_single_requests(folder: Path, length: int) -> None:
    prompt = tuple((7 * i + 3) % tiny_models.VOCAB_SIZE for i in range(length))
    wishes: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "ignore_eos": True, "max_tokens": 24}
    engine, _ = make_engine(folder)
    together = run(engine, [ask("all", prompt, samples=4, seed=11, **wishes)])
    single, _ = make_engine(folder)
    alone = [run(single, [ask(f"{i}", prompt, seed=11 + i, **wishes)])[f"{i}", 0] for i in range(4)]
    assert [together["all", i] for i in range(4)] == alone
    assert len({tuple(output) for output in alone}) == 4


def hand_over(seq: Sequence, first: list[SampledToken], p: TorchModelRunner, d_engine: Engine, d: TorchModelRunner):
    """What prefill node, network and decode node do between them, in six lines."""
    outputs: dict[int, tuple[int, ...]] = {token.sample: (token.token,) for token in first if not token.finish}
    num_full = seq.num_tokens // d_engine.config.block_size
    hits = d_engine.blocks.match(seq.block_hashes(num_full, d_engine.config.block_size))
    d_engine.blocks.acquire(hits)
    fresh = d_engine.allocate(num_full + len(outputs) - len(hits))
    table, spares = hits + fresh[: num_full + 1 - len(hits)], fresh[num_full + 1 - len(hits) :]
    moved = seq.block_table[len(hits) :]
    staging = torch.empty((len(moved), d.pool.as_bytes().shape[1]), dtype=torch.uint8)
    gather_blocks(p.pool.as_bytes(), moved, staging)
    scatter_blocks(staging, d.pool.as_bytes(), table[len(hits) : len(hits) + len(moved)])
    target = Sequence(seq.attempt_id, list(outputs), seq.prompt_tokens, seq.sampling, block_table=table)
    return d_engine.adopt(target, outputs, spares), len(hits)


@pytest.mark.parametrize("samples", [1, 3])
def test_handed_off_requests_go_on_as_if_nothing_had_happened(
    folder: Path, prompts: list[tuple[int, ...]], samples: int
) -> None:
    wishes: dict[str, Any] = {"temperature": 0.8, "seed": 3, "max_tokens": 20}
    undisturbed = run(make_engine(folder)[0], [ask(str(i), p, samples, **wishes) for i, p in enumerate(prompts)])
    p_engine, p_runner = make_engine(folder, max_num_batched_tokens=50)
    d_engine, d_runner = make_engine(folder, num_blocks=1000)
    for i, prompt in enumerate(prompts):
        p_engine.add(ask(str(i), prompt, samples, hand_off=True, **wishes))
    said: Outputs = defaultdict(list)
    num_hits = 0
    while p_engine.has_work or d_engine.has_work:
        p_step, d_step = p_engine.compute(p_engine.schedule(0.0)), d_engine.compute(d_engine.schedule(0.0))
        for token in p_step.sampled + d_step.sampled:
            said[token.sequence.attempt_id.request_id, token.sample].append(token.token)
        for seq in dict.fromkeys(token.sequence for token in p_step.sampled):
            first = [token for token in p_step.sampled if token.sequence is seq]
            if not all(token.finish for token in first):
                num_hits += hand_over(seq, first, p_runner, d_engine, d_runner)[1]
            p_engine.sequences.release(seq)
        p_engine.check_integrity()
        d_engine.check_integrity()
    assert said == undisturbed
    assert num_hits


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_allowed_tokens_and_bad_words_hold_across_a_hand_off(
    folder: Path, prompts: list[tuple[int, ...]], temperature: float
) -> None:
    """The same tokens from one engine as from two, of which the second launches steps ahead."""
    prompts, size = prompts[:12:2], tiny_models.VOCAB_SIZE
    wishes: dict[str, Any] = {"temperature": temperature, "seed": 5, "max_tokens": 12, "ignore_eos": True}
    wishes["allowed_token_ids"] = frozenset(range(0, size, 3))
    free = run(make_engine(folder)[0], [ask(str(i), p, 2, **wishes) for i, p in enumerate(prompts)])
    words = {output[i : i + length] for output in map(tuple, free.values()) for i, length in ((0, 1), (2, 2), (4, 3))}
    wishes["bad_words_token_ids"] = tuple(sorted(words))
    alone = run(
        make_engine(folder, async_scheduling=False)[0], [ask(str(i), p, 2, **wishes) for i, p in enumerate(prompts)]
    )
    assert all(token % 3 == 0 for output in alone.values() for token in output)
    for output in alone.values():
        assert not any(tuple(output[i : i + len(word)]) == word for word in words for i in range(len(output)))
    p_engine, p_runner = make_engine(folder, max_num_batched_tokens=50)
    d_engine, d_runner = make_engine(folder, num_blocks=1000, async_scheduling=True)
    seqs = [ask(str(i), prompt, 2, hand_off=True, **wishes) for i, prompt in enumerate(prompts)]
    for seq in seqs:
        p_engine.add(seq)
    said: Outputs = defaultdict(list)
    while p_engine.has_work:
        p_step = p_engine.compute(p_engine.schedule(0.0))
        for token in p_step.sampled:
            said[token.sequence.attempt_id.request_id, token.sample].append(token.token)
        for seq in dict.fromkeys(token.sequence for token in p_step.sampled):
            hand_over(seq, [token for token in p_step.sampled if token.sequence is seq], p_runner, d_engine, d_runner)
            p_engine.sequences.release(seq)
    for key, output in run(d_engine).items():
        said[key] += output
    assert said == alone


def test_eos_is_honoured_and_min_tokens_puts_it_off(folder: Path) -> None:
    engine, _ = make_engine(folder)
    seq = ask("long", (5, 6, 7), temperature=1.0, logit_bias={tiny_models.EOS: 100.0}, min_tokens=6)
    engine.add(seq)
    tokens = []
    while engine.has_work:
        tokens += engine.compute(engine.schedule(0.0)).sampled
    assert [token.token == tiny_models.EOS for token in tokens] == [False] * 6 + [True]
    assert tokens[-1].finish is FinishReason.STOP


def test_logprobs_are_those_of_transformers(folder: Path) -> None:
    engine, _ = make_engine(folder)
    prompt = tuple(range(20, 60))
    engine.add(ask("one", prompt, num_logprobs=3, max_tokens=5))
    tokens = []
    while engine.has_work:
        tokens += engine.compute(engine.schedule(0.0)).sampled
    ids = torch.tensor([[*prompt, *(token.token for token in tokens)]])
    with torch.inference_mode():
        logprobs = tiny_models.reference(folder)(ids).logits[0].log_softmax(-1)
    for token in tokens:
        row = logprobs[len(prompt) - 1 + token.index]
        assert token.logprobs is not None
        assert token.logprobs.logprob == pytest.approx(row[token.token].item(), abs=1e-3)
        assert [i for i, _ in token.logprobs.top] == row.topk(3).indices.tolist()
