"""What nodes report of their own times: the longest gaps between steps, and its way over the wire."""

import pytest

from baton import wire
from baton.errors import InvalidRequest
from baton.messages import AttemptId, End, HandedOff, Update
from baton.node_times import DecodeTimes, Gap, PromptTimes, StepGaps
from baton.v1 import node_pb2
from baton.wire.node_times import read_decode_times, read_prompt_times

WORK = AttemptId(1, "r", 0)
PROMPT = PromptTimes(0.1, 0.5, 3, 0.6, 0.2, 0.7, 4, 2)
DECODE = DecodeTimes(7, 1.5, (Gap(3, 0.9), Gap(1, 0.1)))


def steps(*times: float) -> DecodeTimes:
    gaps = StepGaps()
    for when in times:
        gaps.step(when)
    told = gaps.times()
    assert told is not None
    return told


def test_only_the_longest_gaps_are_kept_with_their_steps():
    told = steps(10.0, 11.0, 11.5, 14.5, 14.75, 16.75, 17.0)
    assert (told.num_steps, told.decode_s) == (7, 7.0)
    assert told.longest == (Gap(3, 3.0), Gap(5, 2.0), Gap(1, 1.0), Gap(2, 0.5))


def test_two_samples_of_one_step_count_once():
    assert steps(1.0, 1.0, 2.0, 2.0) == DecodeTimes(2, 1.0, (Gap(1, 1.0),))


def test_a_request_without_a_step_has_no_times():
    assert StepGaps().times() is None


@pytest.mark.parametrize("kind", [HandedOff(0.4, 0.1, 0.2, PROMPT), End(None, PROMPT, DECODE), End(None, None, DECODE)])
def test_times_survive_the_wire(kind):
    sent = wire.write_node_message((Update(WORK, kind),))
    updates = wire.read_node_message(node_pb2.NodeMessage.FromString(sent.SerializeToString()))
    assert isinstance(updates, tuple)
    (update,) = updates
    assert repr(update.kind) == repr(kind), "which compare equal without their times"


@pytest.mark.parametrize("name", ["started_s", "computed_s", "granted_s", "first_part_s", "last_part_s"])
def test_times_of_a_prompt_are_seconds(name):
    times = node_pb2.PromptTimes()
    setattr(times, name, -1.0)
    with pytest.raises(InvalidRequest, match=name):
        read_prompt_times(times)


def test_a_node_cannot_report_more_gaps_than_are_kept():
    with pytest.raises(InvalidRequest, match="5 gaps, of at most 4"):
        read_decode_times(node_pb2.DecodeTimes(longest=[node_pb2.Gap(step=1, gap_s=1.0)] * 5))
    with pytest.raises(InvalidRequest, match="gap_s"):
        read_decode_times(node_pb2.DecodeTimes(longest=[node_pb2.Gap(gap_s=float("nan"))]))
