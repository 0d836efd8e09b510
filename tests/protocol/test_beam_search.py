"""A beam search's way through the nodes: the prefill node leaves the last token of the prompt to the decode node."""

from __future__ import annotations

import dataclasses

import pytest

from baton.block_hash import chain
from baton.errors import InvalidRequest, RequestCancelled
from baton.handoff_messages import Commit, CommitReply, Grant, Reserve
from baton.messages import Abort, AttemptId, End, Prefill, Sample, SampleEnd, Tokens
from baton.sampling import FinishReason, SamplingParams
from tests.engine.beam_reference import Found, beam_search
from tests.protocol.decoding import PROMPT, WORK, Decoding
from tests.protocol.fake_model import EOS, most_likely
from tests.protocol.node import BLOCK_SIZE
from tests.protocol.test_prefill_rules import Prefilling
from tests.protocol.test_prefill_work import hear, run, send

WIDTH = 3
SAMPLING = SamplingParams(temperature=0.0, beam_width=WIDTH, max_tokens=6)
SAMPLES = (Sample(0), Sample(1), Sample(2))


def expected(prompt: tuple[int, ...] = PROMPT) -> Found:
    return beam_search(lambda tokens: most_likely(tokens, 2 * WIDTH), prompt, WIDTH, 6, (EOS,))


def found(decoding: Decoding, attempt_id: AttemptId = WORK) -> list[tuple[int, ...]]:
    tokens = [kind for kind in decoding.kinds(Tokens, attempt_id) if isinstance(kind, Tokens)]
    assert [(one.sample, one.first_index) for one in tokens] == [(0, 0), (1, 0), (2, 0)], "each comes as a whole"
    ends = [kind for kind in decoding.kinds(SampleEnd, attempt_id) if isinstance(kind, SampleEnd)]
    reasons = [FinishReason.STOP if one.token_ids[-1] == EOS else FinishReason.LENGTH for one in tokens]
    assert [(end.sample, end.reason) for end in ends] == list(enumerate(reasons))
    assert decoding.kinds(End, attempt_id) == [End()]
    return [one.token_ids for one in tokens]


def adopted(decoding: Decoding, prompt: tuple[int, ...] = PROMPT) -> None:
    """All but the prompt's last token comes from a prefill node."""
    computed = prompt[:-1]
    decoding.reserve(prompt=computed, n=WIDTH, max_total_tokens=len(prompt) + 6)
    (grant,) = decoding.grants
    decoding.send(grant, computed)
    decoding.commit(grant, dict.fromkeys(range(WIDTH), ()), prompt, sampling=SAMPLING)


@pytest.mark.parametrize("length", [2, 4, 5, 9, 10])
def test_a_decode_node_goes_on_from_the_last_token_of_the_prompt(length: int) -> None:
    decoding = Decoding()
    adopted(decoding, PROMPT[:length])
    decoding.run()
    decoding.turn()
    assert found(decoding) == [tokens for tokens, _ in expected(PROMPT[:length])]
    assert decoding.core.idle
    assert decoding.node.pool_is_whole()


@pytest.mark.parametrize("length", [1, 5, 10])
def test_a_decode_node_alone_finds_the_same(length: int) -> None:
    decoding = Decoding()
    prompt = PROMPT[:length]
    attempt_id = decoding.prefill(
        "r", prompt, n=WIDTH, temperature=0.0, beam_width=WIDTH, max_tokens=6, ignore_eos=False
    )
    decoding.run()
    decoding.turn()
    assert found(decoding, attempt_id) == [tokens for tokens, _ in expected(prompt)]


@pytest.mark.parametrize("num_turns", [0, 1, 2, 3])
def test_one_that_is_aborted_leaves_nothing(num_turns: int) -> None:
    decoding = Decoding()
    adopted(decoding)
    for _ in range(num_turns):
        decoding.turn()
        if decoding.node.model.is_busy:
            decoding.node.advance_device()
    decoding.hear(Abort(WORK))
    decoding.run()
    decoding.turn()
    assert [type(end.error) for end in decoding.kinds(End)] == [RequestCancelled]  # type: ignore[attr-defined]
    assert not decoding.kinds(Tokens)
    assert decoding.core.idle
    assert decoding.node.pool_is_whole()


@pytest.mark.parametrize("is_early", [False, True])
def test_a_sample_that_is_stopped_leaves_the_others_their_beams(is_early: bool) -> None:
    decoding = Decoding()
    computed, stop = PROMPT[:-1], Abort(WORK, (0,))
    decoding.reserve(prompt=computed, n=WIDTH, max_total_tokens=len(PROMPT) + 6)
    (grant,) = decoding.grants
    decoding.commit(grant, dict.fromkeys(range(WIDTH), ()), sampling=SAMPLING)
    if is_early:
        decoding.hear(stop)
    decoding.send(grant, computed)
    decoding.turn()
    decoding.hear(stop)
    decoding.run()
    decoding.turn()
    outputs = [tuple(decoding.output(sample)) for sample in range(WIDTH)]
    assert outputs == [(), *(tokens for tokens, _ in expected()[1:])]


@pytest.mark.parametrize("handed_over", [False, True])
def test_an_attempt_at_some_of_the_samples_gives_them_the_same_beams(handed_over: bool) -> None:
    """As when the others were stopped, and then the node was lost that had all of them."""
    decoding, wanted = Decoding(), (Sample(1), Sample(2))
    if handed_over:
        decoding.reserve(prompt=PROMPT[:-1], n=WIDTH, max_total_tokens=len(PROMPT) + 6)
        (grant,) = decoding.grants
        decoding.send(grant, PROMPT[:-1])
        decoding.commit(grant, {sample.index: () for sample in wanted}, sampling=SAMPLING)
    else:
        prefill = Prefill(WORK, decoding.node.incarnation, PROMPT, wanted, SAMPLING, 60.0)
        decoding.hear(prefill)
    decoding.run()
    decoding.turn()
    outputs = [tuple(decoding.output(sample)) for sample in range(WIDTH)]
    assert outputs == [(), *(tokens for tokens, _ in expected()[1:])]


def test_one_that_may_not_fit_ends_its_lease() -> None:
    decoding = Decoding(num_blocks=18)
    decoding.reserve(prompt=PROMPT[:-1], n=WIDTH, max_total_tokens=30)
    decoding.commit(
        decoding.grants[0],
        dict.fromkeys(range(WIDTH), ()),
        sampling=dataclasses.replace(SAMPLING, max_tokens=40),
    )
    assert isinstance(decoding.replies[0].error, InvalidRequest)
    assert [type(end.error) for end in decoding.kinds(End)] == [InvalidRequest]  # type: ignore[attr-defined]
    assert decoding.core.idle


def test_a_prefill_node_computes_all_but_the_last_token_and_streams_nothing() -> None:
    prefilling = Prefilling()
    prompt = PROMPT[:9]
    send(prefilling, prompt_tokens=prompt, samples=SAMPLES[:2], sampling=SAMPLING)
    (reserve,) = (said for said in prefilling.said if isinstance(said, Reserve))
    assert (reserve.num_tokens, reserve.num_samples, reserve.max_total_tokens) == (8, WIDTH, 15)
    assert list(reserve.block_hashes) == chain(prompt[:8], BLOCK_SIZE)
    run(prefilling)
    hear(prefilling, Grant(WORK, 1, len(reserve.block_hashes), 0, 0))
    run(prefilling)
    (commit,) = (said for said in prefilling.said if isinstance(said, Commit))
    assert (commit.prompt_tokens, commit.samples) == (prompt, SAMPLES[:2])
    hear(prefilling, CommitReply(1, WORK))
    assert prefilling.node.core.idle


@pytest.mark.parametrize("fields", [{"prompt_tokens": PROMPT[:1]}, {"samples": (Sample(0, (5,)),)}, {"decode": None}])
def test_what_a_prefill_node_cannot_begin_is_refused(fields: dict[str, object]) -> None:
    prefilling = Prefilling()
    send(prefilling, WORK, **{"sampling": SAMPLING, **fields})
    assert [type(end.error) for end in prefilling.ends] == [InvalidRequest]
    assert prefilling.node.core.idle
