"""From a Prefill to a sequence: what goes on from where an earlier attempt stopped, and what is refused."""

from __future__ import annotations

import pytest

from baton.errors import InvalidRequest
from baton.messages import AttemptId, Prefill, Sample
from baton.sampling import SamplingParams
from node.intake import make_sequence


def prefill(*outputs: tuple[int, ...], max_tokens: int = 4) -> Prefill:
    samples = tuple(Sample(index, output) for index, output in enumerate(outputs))
    sampling = SamplingParams(max_tokens=max_tokens)
    return Prefill(AttemptId(1, "r", 2), "i", (1, 2, 3), samples, sampling, 60.0, cache_salt="salt")


def test_it_goes_on_behind_what_was_said() -> None:
    seq = make_sequence(prefill((7, 8)), hand_off=True, now=5.0)
    assert (seq.attempt_id, seq.samples, seq.prompt_tokens) == (AttemptId(1, "r", 2), [0], (1, 2, 3))
    assert (list(seq.tokens), seq.output_tokens) == ([1, 2, 3, 7, 8], (7, 8))
    assert (seq.hand_off, seq.cache_salt, seq.arrived_s) == (True, "salt", 5.0)


def test_several_samples_share_a_prompt_while_none_has_output() -> None:
    seq = make_sequence(prefill((), ()), hand_off=False, now=0.0)
    assert (seq.samples, list(seq.tokens)) == ([0, 1], [1, 2, 3])


@pytest.mark.parametrize(
    "refused",
    [prefill((7, 8), max_tokens=2), prefill((7, 8), max_tokens=1)],
    ids=["all tokens exist", "more tokens exist"],
)
def test_what_makes_no_sense_is_refused(refused: Prefill) -> None:
    with pytest.raises(InvalidRequest):
        make_sequence(refused, hand_off=False, now=0.0)
