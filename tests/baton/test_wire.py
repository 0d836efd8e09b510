"""Every message survives the wire; whatever a broken or newer peer sends is refused by name."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton import wire
from baton.errors import InvalidRequest, LayoutMismatch, NodeUnavailable
from baton.handoff_messages import Refuse, Reserve
from baton.messages import Abort, AttemptId, DecodeTarget, End, Migrate, Prefill, Sample, SampleEnd, Update
from baton.sampling import FinishReason, SamplingParams
from baton.v1 import common_pb2, node_pb2
from tests.baton import strategies

LIMITS = wire.Limits(vocab_size=100, max_model_len=64, max_seconds=30.0, block_size=4, num_layers=2)
RUNS = settings(max_examples=80, deadline=None, derandomize=True)


def same(sent: object, received: object) -> bool:
    """Errors have no equality of their own: their text must agree."""
    return sent == received or repr(sent) == repr(received)


def through(message, kind):
    """The protobuf as a peer parses it."""
    return kind.FromString(message.SerializeToString())


@RUNS
@given(strategies.router_message)
def test_router_message_round_trip(message):
    sent = through(wire.write_router_message(message), node_pb2.RouterMessage)
    assert same(message, wire.read_router_message(sent))


@RUNS
@given(st.lists(strategies.router_message, min_size=1, max_size=3))
def test_what_a_router_says_at_once_is_split_into_the_same_messages(messages):
    joined = wire.join_router_messages([wire.write_router_message(message) for message in messages])
    parts = wire.split_router_message(through(joined, node_pb2.RouterMessage))
    assert all(map(same, messages, map(wire.read_router_message, parts)))
    assert len(parts) == len(messages)


def test_an_abort_of_what_was_placed_after_its_deadline_is_an_abort():
    """Its body came too slowly. A node would refuse a negative time, and log that as the request's fault."""
    abort = wire.write_router_message(Abort(AttemptId(1, "r", 0), (1,), -0.5))
    assert wire.read_router_message(abort) == Abort(AttemptId(1, "r", 0), (1,), 0.0)


def test_several_messages_are_none_until_they_are_split():
    abort = wire.write_router_message(Abort(AttemptId(1, "r", 0), (), 5.0))
    several = wire.join_router_messages([abort, abort])
    for message in (several, *wire.split_router_message(wire.join_router_messages([several, several]))):
        with pytest.raises(InvalidRequest, match="no known kind"):
            wire.read_router_message(message)
        assert wire.attempt_of(message) is None


@RUNS
@given(strategies.node_message)
def test_node_message_round_trip(message):
    assert same(message, wire.read_node_message(through(wire.write_node_message(message), node_pb2.NodeMessage)))


@RUNS
@given(strategies.prefill_message)
def test_prefill_message_round_trip(message):
    sent = through(wire.write_prefill_message(message), node_pb2.PrefillMessage)
    assert same(message, wire.read_prefill_message(sent))


@RUNS
@given(strategies.decode_message)
def test_decode_message_round_trip(message):
    sent = through(wire.write_decode_message(message), node_pb2.DecodeMessage)
    assert same(message, wire.read_decode_message(sent))


@RUNS
@given(strategies.node_info)
def test_node_info_round_trip(info):
    assert wire.read_node_info(through(wire.write_node_info(info), common_pb2.NodeInfo)) == info


def test_tokens_are_little_endian_uint32():
    assert wire.pack_tokens([1, 0x01020304]) == b"\x01\0\0\0\x04\x03\x02\x01"
    assert wire.unpack_tokens(b"\x01\0\0\0\x04\x03\x02\x01") == (1, 0x01020304)
    assert wire.unpack_tokens(wire.pack_tokens(range(10_000))) == tuple(range(10_000))


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1.5]])
def test_token_that_does_not_fit_is_refused(tokens):
    with pytest.raises(InvalidRequest, match="prompt: a token id"):
        wire.pack_tokens(tokens, "prompt")


def test_left_over_bytes_are_refused():
    with pytest.raises(InvalidRequest, match="prompt: 5 bytes"):
        wire.unpack_tokens(b"12345", "prompt")


def good_prefill() -> node_pb2.RouterMessage:
    message = Prefill(AttemptId(1, "r", 0), "i", (1, 2), (Sample(0),), SamplingParams(), 1.0)
    return wire.write_router_message(message)


def change(**fields):
    """A good Prefill with the named fields set to what a broken peer may send."""

    def apply() -> node_pb2.RouterMessage:
        wire_message = good_prefill()
        for name, value in fields.items():
            if isinstance(value, list):
                del wire_message.prefill.samples[:]
                wire_message.prefill.samples.extend(value)
            else:
                setattr(wire_message.prefill, name, value)
        return wire_message

    return apply


def bad_temperature() -> node_pb2.RouterMessage:
    wire_message = good_prefill()
    wire_message.prefill.sampling.temperature = float("nan")
    return wire_message


def unnamed_work() -> node_pb2.RouterMessage:
    wire_message = good_prefill()
    wire_message.prefill.ClearField("attempt_id")
    return wire_message


A = common_pb2.Sample(index=0, output_tokens=b"\1\0\0\0")
B = common_pb2.Sample(index=1, output_tokens=b"\1\0\0\0")
EMPTY = common_pb2.Sample(index=0)
LONGER = common_pb2.Sample(index=1, output_tokens=b"\1\0\0\0\1\0\0\0")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (node_pb2.RouterMessage, "no known kind"),
        (unnamed_work, "attempt_id names no request"),
        (change(prompt_tokens=b""), "prompt: no tokens"),
        (change(prompt_tokens=b"123"), "prompt: 3 bytes"),
        (change(samples=[]), "samples: none"),
        (change(samples=[EMPTY, EMPTY]), "given twice"),
        (change(samples=[A, B]), "cannot share one prefill"),
        (change(samples=[A, LONGER]), "differ in length"),
        (change(deadline_s=float("nan")), "deadline_s"),
        (change(deadline_s=float("inf")), "deadline_s"),
        (change(deadline_s=-1.0), "deadline_s"),
        (bad_temperature, "temperature must be"),
    ],
)
def test_malformed_router_message_is_refused(make, text):
    with pytest.raises(InvalidRequest, match=text):
        wire.read_router_message(make())


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (wire.read_node_message, node_pb2.NodeMessage()),
        (wire.read_prefill_message, node_pb2.PrefillMessage()),
        (wire.read_decode_message, node_pb2.DecodeMessage()),
    ],
)
def test_message_of_no_kind_is_refused(read, message):
    with pytest.raises(InvalidRequest, match="no known kind"):
        read(message)


def failure(message: node_pb2.NodeMessage) -> str:
    """Of the one update, which makes no sense: why its work, and no other, ends."""
    updates = wire.read_node_message(node_pb2.NodeMessage.FromString(message.SerializeToString()), LIMITS)
    assert isinstance(updates, tuple)
    (update,) = updates
    assert isinstance(update.kind, End)
    assert isinstance(update.kind.error, NodeUnavailable)
    return update.kind.error.message


def test_unknown_enum_values_are_refused_by_name():
    end = Update(AttemptId(1, "r", 0), SampleEnd(0, FinishReason.STOP))
    message = wire.write_node_message((end,))
    message.updates.updates[0].sample_end.reason = 77  # type: ignore[assignment]
    assert "finish reason 77" in failure(message)
    with pytest.raises(InvalidRequest, match="node role 9"):
        wire.read_node_info(common_pb2.NodeInfo(role=9))  # type: ignore[arg-type]


def test_errors_keep_kind_and_text():
    attempt_id = AttemptId(1, "r", 3)
    refuse = wire.read_decode_message(
        wire.write_decode_message(Refuse(attempt_id, LayoutMismatch("block_size 16 != 32")))
    )
    assert isinstance(refuse, Refuse)
    assert isinstance(refuse.error, LayoutMismatch)
    assert refuse.error.message == "block_size 16 != 32"
    end = wire.read_node_message(wire.write_node_message((Update(attempt_id, End()),)))
    assert end == (Update(attempt_id, End(None)),)


def test_ragged_parts_of_messages_are_refused():
    tokens = {"token_ids": b"\1\0\0\0", "logprobs": [{"logprob": -1.0}, {"logprob": -2.0}]}
    message = node_pb2.NodeMessage(updates={"updates": [{"attempt_id": {"request_id": "r"}, "tokens": tokens}]})
    assert "1 tokens with 2 logprobs" in failure(message)
    reserve = {"attempt_id": {"request_id": "r"}, "num_tokens": 2, "num_samples": 1, "max_total_tokens": 9}
    reserve["block_hashes"] = b"x" * 33
    with pytest.raises(InvalidRequest, match="block_hashes: 33 bytes"):
        wire.read_prefill_message(node_pb2.PrefillMessage(reserve=reserve))
    with pytest.raises(InvalidRequest, match="hello names no incarnation"):
        wire.read_prefill_message(node_pb2.PrefillMessage(hello={"node_id": "x"}))


@pytest.mark.parametrize(("move", "text"), [(0, "move: it is counted from 1"), (2**20, "move")])
def test_a_move_has_a_number(move, text):
    sent = wire.write_router_message(Migrate(AttemptId(1, "r", 0), 1, DecodeTarget("there", "i")))
    sent.migrate.move = move
    with pytest.raises(InvalidRequest, match=text):
        wire.read_router_message(sent)


@pytest.mark.parametrize(
    ("num_spare", "num_hashes", "fits"), [(3, 3, True), (3, 4, False), (2, 4, True), (18, 0, False)]
)
def test_spare_tokens_have_no_hashes(num_spare, num_hashes, fits):
    hashes = (b"h" * 32,) * num_hashes
    reserve = Reserve(AttemptId(1, "r", 0), "i", 18, hashes, 1, 5.0, 24, move=1, num_spare_tokens=num_spare)
    sent = wire.write_prefill_message(reserve)
    if fits:
        assert wire.read_prefill_message(sent, LIMITS) == reserve
    else:
        with pytest.raises(InvalidRequest, match=r"block_hashes|spare tokens"):
            wire.read_prefill_message(sent, LIMITS)


def test_an_error_may_say_anything():
    refuse = Refuse(AttemptId(1, "r", 0), InvalidRequest("no such word: \ud800\u00e9"))
    read = wire.read_decode_message(wire.write_decode_message(refuse))
    assert isinstance(read, Refuse)
    assert read.error.message == "no such word: \\ud800\u00e9"
