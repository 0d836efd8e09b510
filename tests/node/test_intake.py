"""From a Prefill to a sequence: what goes on from where an earlier attempt stopped, and what is refused."""

from __future__ import annotations

import pytest

from baton.errors import InvalidRequest
from baton.messages import AttemptId, DecodeTarget, End, Prefill, Sample, Update
from baton.node_info import NodeRole
from baton.sampling import SamplingParams
from engine.sequence import Sequence
from node.events import SessionOpened
from tests.protocol.network import EPOCH
from tests.protocol.world import World

WORK = AttemptId(EPOCH, "r", 2)
both_roles = pytest.mark.parametrize("role", [NodeRole.PREFILL, NodeRole.DECODE])


class Intake:
    """A node of that role, which takes in one Prefill with these outputs."""

    def __init__(self, role: NodeRole, *outputs: tuple[int, ...], max_tokens: int = 4) -> None:
        nodes = World(num_prefill=1, num_decode=1).nodes.values()
        node = next(node for node in nodes if node.role is role)
        samples = tuple(Sample(index, output) for index, output in enumerate(outputs))
        sampling, target = SamplingParams(max_tokens=max_tokens), DecodeTarget("address", "d")
        prefill = Prefill(WORK, node.incarnation, (1, 2, 3), samples, sampling, 60.0, target, cache_salt="salt")
        node.core.handle(SessionOpened(EPOCH), 4.0)
        node.core.handle(prefill, 5.0)
        self.queued: list[Sequence] = list(node.core.engine.waiting)
        updates = [output for output in node.core.take_outputs() if isinstance(output, Update)]
        self.ends = [update.kind for update in updates if isinstance(update.kind, End)]


@both_roles
def test_it_goes_on_behind_what_was_said(role: NodeRole) -> None:
    (seq,) = Intake(role, (7, 8)).queued
    assert (seq.attempt_id, seq.samples, seq.prompt_tokens) == (WORK, [0], (1, 2, 3))
    assert (list(seq.tokens), seq.output_tokens) == ([1, 2, 3, 7, 8], (7, 8))
    assert (seq.hand_off, seq.cache_salt, seq.arrived_s) == (role is NodeRole.PREFILL, "salt", 5.0)


@both_roles
def test_several_samples_share_a_prompt_while_none_has_output(role: NodeRole) -> None:
    (seq,) = Intake(role, (), ()).queued
    assert (seq.samples, list(seq.tokens)) == ([0, 1], [1, 2, 3])


@pytest.mark.parametrize("max_tokens", [2, 1], ids=["all tokens exist", "more tokens exist"])
def test_what_makes_no_sense_is_refused(max_tokens: int) -> None:
    refused = Intake(NodeRole.DECODE, (7, 8), max_tokens=max_tokens)
    assert not refused.queued
    assert [type(end.error) for end in refused.ends] == [InvalidRequest]
