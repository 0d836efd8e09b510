"""A model that only takes time: its profile, its tokens, and that an engine on it does what it does on another."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from baton.messages import AttemptId
from baton.sampling import SamplingParams
from engine.config import EngineConfig
from engine.engine import Engine
from engine.sequence import Sequence, SequenceState
from engine.simulated.profile import EMBEDDED, Profile, load_profile
from engine.simulated.runner import SimulatedModelRunner
from engine.simulated.tokens import MadeUpTokens
from engine.step import Begun, Chunk
from engine.step_size import StepSize
from tests.engine.counting import Counting

PROFILE = (EMBEDDED / "h200-8b.toml").read_text()
CONFIG = EngineConfig(
    num_blocks=25, max_model_len=96, vocab_size=50, eos_token_ids=(7,), block_size=4, max_num_batched_tokens=24
)


def profile(tmp_path: Path, *changes: tuple[str, str]) -> Profile:
    text = PROFILE
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    file = tmp_path / "node.toml"
    file.write_text(text)
    return load_profile(str(file))


def sequence(number: int, num_tokens: int, **kwargs: Any) -> Sequence:
    sampling = SamplingParams(max_tokens=kwargs.pop("max_tokens", 5), ignore_eos=True)
    prompt = tuple((number * 31 + i) % 50 for i in range(num_tokens))
    return Sequence(AttemptId(1, str(number), 0), [0], prompt, sampling, arrived_s=float(number), **kwargs)


class Time:
    """`wakes`: the times for which the loop was to be woken."""

    def __init__(self) -> None:
        self.now = 0.0
        self.wakes: list[float] = []

    def runner(self, profile: Profile, **kwargs: Any) -> SimulatedModelRunner:
        return SimulatedModelRunner(
            profile, MadeUpTokens(50, (7,)), clock=lambda: self.now, wake_at=self.wakes.append, **kwargs
        )


# ---- the profile ----


def test_a_step_costs_what_the_profile_says_of_its_parts() -> None:
    told = load_profile("h200-8b")  # contexts of the tables grow by 240 tokens
    assert told.step_s(StepSize(8, 8 * 1144)) == pytest.approx(4.57e-3, rel=0.02)
    assert told.step_s(StepSize(32, 32 * 1144)) == pytest.approx(5.43e-3, rel=0.02)
    assert told.step_s(StepSize(128, 128 * 1144)) == pytest.approx(9.62e-3, rel=0.02)
    assert told.step_s(StepSize(32, 32 * 8312)) == pytest.approx(12.07e-3, rel=0.02)
    assert told.step_s(StepSize(1, 0, 2048, 2048 * 2048)) == pytest.approx(49.1e-3, rel=0.02)
    assert told.step_s(StepSize(1, 0, 512, 512 * 512)) == pytest.approx(12.6e-3, rel=0.02)
    assert told.layout(16, "").block_bytes == 16 * 131072


def test_a_prompt_makes_no_step_shorter() -> None:
    told = load_profile("h200-8b")
    cheap = dataclasses.replace(told, mixed_step=dataclasses.replace(told.step, constant_us=1.0))
    decodes, mixed = StepSize(8, 8 * 1024), StepSize(9, 8 * 1024, 1, 1)
    assert told.step_s(mixed) >= told.step_s(decodes)
    assert cheap.step_s(mixed) >= cheap.step_s(decodes)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("constant_us = 4172", "", "step: lacks constant_us"),
        ("constant_us = 4172", "constant_us = -1", "step.constant_us must be 0 or more, not -1"),
        ("constant_us = 4172", "constant_us = nan", "step.constant_us must be 0 or more, not nan"),
        ("constant_us = 4172", "constant_us = 'x'", "step.constant_us must be of type float, not 'x'"),
        ("per_adopted_seq_us = 1450", "per_adopted_seq_us = -1", "step.per_adopted_seq_us must be 0 or more, not -1"),
        ("[prompt_step]", "[prompt_step]\nper_adopted_seq_us = 1", "prompt_step: unknown: per_adopted_seq_us"),
        ("num_layers = 32", "num_layers = 32.5", "model.num_layers must be of type int, not 32.5"),
        ("[link]", "[link]\ncolour = 1", "link: unknown: colour"),
        ("[link]", "[lnk]", "unknown: lnk"),
        ("bandwidth_gb_s = 340", "bandwidth_gb_s = 0", "link.bandwidth_gb_s must be more than 0"),
        ("[link]", "[spread]\nstep = 1.0\n[link]", "spread.step must be a list of numbers, not 1.0"),
        ("[link]", "[spread]\nprompt_step = []\n[link]", "spread.prompt_step must be a list of numbers, not "),
        ("[link]", "[spread]\nstep = [1.0, -0.5]\n[link]", "spread.step must be 0 or more, not -0.5"),
        ("[step]", "[step", "not TOML"),
    ],
)
def test_what_is_wrong_with_a_profile_is_named(tmp_path: Path, old: str, new: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"--profile .*node.toml: {text}"):
        profile(tmp_path, (old, new))


def test_a_profile_that_is_not_there_is_told_with_those_that_are() -> None:
    with pytest.raises(ValueError, match=r"--profile nowhere: .*come with baton: .*h200-8b"):
        load_profile("nowhere")


# ---- steps ----


def test_steps_run_one_after_the_other_and_wake_the_loop_at_their_ends() -> None:
    time, told = Time(), load_profile("h200-8b")
    runner = time.runner(told, time_scale=2.0)
    seq = sequence(0, 8)
    first = runner.launch([Chunk.of(seq, 0, 8)])
    second = runner.launch([Chunk.of(seq, 7, 1)])
    takes = told.step_s(StepSize(1, 0, 8, 64)) / 2
    then = takes + told.step_s(StepSize(1, 8)) / 2
    assert time.wakes == pytest.approx([takes, then])
    assert not first.is_done()
    time.now = time.wakes[0]
    assert first.is_done()
    assert not second.is_done()
    time.now = time.wakes[1]
    assert second.is_done()


def test_steps_vary_as_the_profile_says(tmp_path: Path) -> None:
    """Those with prompts in their own way; the same with the same seed."""
    told = profile(tmp_path, ("[link]", "[spread]\nstep = [0.5, 1, 2]\nprompt_step = [3]\n[link]"))

    def factors(seed: int, length: int) -> list[float]:
        time, chunk = Time(), Chunk.of(sequence(0, 8), 8 - length, length)
        runner = time.runner(told, seed=seed)
        for _ in range(200):
            runner.launch([chunk])
        alone = told.step_s(StepSize.of([chunk]))
        return [round((b - a) / alone, 6) for a, b in itertools.pairwise(time.wakes)]

    decodes = Counter(factors(0, 1))
    assert decodes.keys() == {0.5, 1, 2}
    assert min(decodes.values()) > 40
    assert set(factors(0, 8)) == {3}
    assert factors(0, 1) == factors(0, 1) != factors(1, 1)


def test_a_step_takes_longer_for_each_sequence_that_was_handed_over() -> None:
    """Once for each, beside prompts too, and again after it was forgotten; never for one computed here."""
    time, told = Time(), load_profile("h200-8b")
    runner, own, others = time.runner(told), sequence(0, 8), [sequence(number, 8) for number in (1, 2)]
    adopted_s = 1e-6 * told.step.per_adopted_seq_us
    assert adopted_s > 0

    def extra_s(*chunks: Chunk) -> float:
        time.now = max(time.wakes, default=0.0)
        runner.launch(chunks)
        return time.wakes[-1] - time.now - told.step_s(StepSize.of(chunks))

    first = [Chunk.of(other, 7, 1) for other in others]
    assert extra_s(Chunk.of(own, 0, 8), first[0]) == pytest.approx(adopted_s)
    assert extra_s(Chunk.of(own, 7, 1), first[0]) == pytest.approx(0, abs=1e-9)
    runner.forget(others[0])
    assert extra_s(*first) == pytest.approx(2 * adopted_s)


def test_layers_of_a_prompt_to_hand_off_are_done_in_groups() -> None:
    time = Time()
    runner = time.runner(load_profile("h200-8b"), layer_groups=4)
    step = runner.launch([Chunk.of(sequence(0, 8, hand_off=True), 0, 8)])
    done = []
    for when in list(time.wakes):
        time.now = when
        done.append(step.num_layers_done())
    assert done == [8, 16, 24, 32]
    assert step.is_done()


# ---- tokens ----


def test_an_answer_follows_from_its_prompt_and_goes_on_the_same_elsewhere() -> None:
    whole = answer_of(sequence(1, 10, max_tokens=12))
    rest = sequence(1, 10, max_tokens=12)
    rest.tokens.extend(whole[:3])
    assert answer_of(rest) == whole[3:]
    assert answer_of(sequence(2, 10, max_tokens=12)) != whole
    assert len(set(whole)) > 6
    assert all(0 <= token < 50 and token != 7 for token in whole)


@pytest.mark.parametrize("num_logprobs", [-1, 0, 2])
def test_logprobs_are_as_many_as_were_asked_for(num_logprobs: int) -> None:
    seq = sequence(1, 3)
    seq.sampling = dataclasses.replace(seq.sampling, num_logprobs=num_logprobs)
    (choice,) = MadeUpTokens(50, (7,)).choices(Chunk.of(seq, 0, 3))
    found = None if choice.logprobs is None else len(choice.logprobs.top)
    assert found == (None if num_logprobs < 0 else num_logprobs)


@pytest.mark.parametrize(("num_tokens", "num_top", "most"), [(3000, 0, 1024), (3000, 49, 430), (90, 10_000, 430)])
def test_logprobs_of_a_prompt_come_in_pieces_that_can_be_sent(num_tokens: int, num_top: int, most: int) -> None:
    seq = sequence(1, num_tokens, num_prompt_logprobs=num_top)
    pieces = list(MadeUpTokens(50, (7,)).prompt_logprobs(Chunk.of(seq, 0, num_tokens)))
    assert [index for piece in pieces for index in range(piece.first_index, piece.end_index)] == [*range(1, num_tokens)]
    assert max(piece.num_tokens for piece in pieces) == min(most, num_tokens - 1)
    for entry in itertools.islice(pieces[0], 20):
        assert len(entry.top) == len(dict(entry.top)) == min(num_top, 49)


def test_tokens_are_all_but_those_that_are_never_said() -> None:
    tokens, seq = MadeUpTokens(8, (1, 3)), sequence(1, 10)
    assert {tokens.token(seq, 0, index) for index in range(200)} == {0, 2, 4, 5, 6, 7}


@pytest.mark.parametrize("ends", ["stops", "leaves"])
def test_nothing_is_kept_of_a_request_that_ends_while_its_next_step_runs(ends: str) -> None:
    runner, third = Time().runner(load_profile("h200-8b")), answer_of(sequence(1, 10))[2]
    engine = Engine(dataclasses.replace(CONFIG, async_scheduling=True), runner)
    seq = sequence(1, 10, max_tokens=12)
    if ends == "stops":
        seq.sampling = dataclasses.replace(seq.sampling, stop_token_ids=frozenset({third}))
    engine.add(seq)
    for _ in range(3):
        engine.compute(engine.schedule(0.0))
    assert seq.in_flight
    if ends == "leaves":
        engine.sequences.release(seq)
    drain(engine)
    assert seq.state is SequenceState.FINISHED
    assert not runner._tokens._prompts
    assert not runner._known


def answer_of(seq: Sequence) -> list[int]:
    engine = Engine(CONFIG, Time().runner(load_profile("h200-8b")))
    engine.add(seq)
    return drain(engine)


def drain(engine: Engine, limit: int = 500) -> list[int]:
    """Until nothing is left to do; the tokens that came of it."""
    sampled = list[int]()
    for turn in range(limit):
        result = engine.compute(engine.schedule(float(turn)))
        sampled += [token.token for token in result.sampled]
        if not engine.has_work and not result.again:
            return sampled
    raise AssertionError("never done")


# ---- the engine on it ----


def launches_of(engine: Engine) -> list[list[tuple[str, int, int, int]]]:
    """Has the engine's steps recorded: of each chunk its request, where it begins, its length and its logits."""
    runner, steps = engine._runner, list[list[tuple[str, int, int, int]]]()
    launch = runner.launch

    def recorded(chunks: Any, begun: Begun = lambda waited_s: None) -> Any:
        steps.append([(c.sequence.attempt_id.request_id, c.start, c.length, c.num_logits) for c in chunks])
        return launch(chunks, begun)

    runner.launch = recorded
    return steps


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_steps_are_those_of_a_model_that_computes(async_scheduling: bool) -> None:
    """The same chunks in the same steps, with long prompts in pieces, a shared prefix and preemptions."""
    config = dataclasses.replace(CONFIG, async_scheduling=async_scheduling)
    model: Any = Counting()
    engines = [Engine(config, model), Engine(config, Time().runner(load_profile("h200-8b")))]
    steps = [launches_of(engine) for engine in engines]
    for engine in engines:
        for number, length in enumerate((40, 10, 30, 5)):
            engine.add(sequence(number, length, max_tokens=20))
        engine.add(sequence(0, 40, max_tokens=6))  # the first one's prompt again
        drain(engine)
        engine.check_integrity()
    assert engines[0].num_preemptions > 0
    assert steps[0] == steps[1]


# ---- without torch ----

SCRIPT = """
import sys
import node.parts, node.run, prefill_node.node, decode_node.node, prefill_node.main, decode_node.main
from prefill_node.settings import PrefillSettings
from node import preflight
from node.events import SessionOpened
settings = PrefillSettings(model="baton-tiny", engine="simulated", profile="h200-8b")
preflight.check(settings)
parts = node.parts.assemble(prefill_node.node.make_role, settings, lambda: None)
parts.role.prepare(0.0)
parts.transport.close()
loaded = {"torch", "transformers", "numpy", "triton"} & sys.modules.keys()
assert not loaded, f"a simulated node loads {loaded}"
peak_kib = int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
assert peak_kib < 100 * 1024, f"a simulated node takes {peak_kib} KiB"
"""


def test_a_simulated_node_is_made_without_torch_in_less_than_100_mb() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=120)
