"""Requests with logits processors that a node has not."""

from __future__ import annotations

import dataclasses

from baton.errors import InvalidRequest
from baton.handoff_messages import Refuse
from baton.logits_processors import LogitsProcessor
from baton.messages import End
from baton.sampling import SamplingParams
from tests.protocol.decoding import SAMPLING, Decoding
from tests.protocol.test_prefill_rules import Prefilling
from tests.protocol.test_prefill_work import send

UNKNOWN = dataclasses.replace(SAMPLING, logits_processors=(LogitsProcessor("frob"),))


def test_a_commit_with_one_that_the_decode_node_lacks_ends_its_lease() -> None:
    decoding = Decoding()
    decoding.reserve()
    decoding.commit(decoding.grants[0], {0: (5,)}, sampling=UNKNOWN)
    (reply,) = decoding.replies
    assert isinstance(reply.error, InvalidRequest)
    assert "none called 'frob'" in reply.error.message
    assert any(isinstance(said, Refuse) for said in decoding.said)
    assert [type(end.error) for end in decoding.kinds(End)] == [InvalidRequest]  # type: ignore[attr-defined]
    assert decoding.core.idle
    decoding.commit(decoding.grants[0], {0: (5,)})
    assert isinstance(decoding.replies[1].error, InvalidRequest), "a repeat is answered differently"


def test_a_prompt_with_one_that_the_node_lacks_is_refused() -> None:
    decoding = Decoding()
    attempt_id = decoding.prefill("r", logits_processors=UNKNOWN.logits_processors)
    decoding.turn()
    assert [type(end.error) for end in decoding.kinds(End, attempt_id)] == [InvalidRequest]  # type: ignore[attr-defined]
    prefilling = Prefilling()
    send(prefilling, sampling=SamplingParams(logits_processors=UNKNOWN.logits_processors))
    assert [type(end.error) for end in prefilling.ends] == [InvalidRequest]
    assert prefilling.node.core.idle
