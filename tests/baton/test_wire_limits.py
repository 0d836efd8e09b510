"""What its reader cannot take is refused by name when it is read, before anything is built of it; and random bytes are
either a message or refused."""

from __future__ import annotations

import random
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from baton import wire
from baton.errors import InvalidRequest, NodeUnavailable
from baton.handoff_messages import Commit, CommitReply, Credit, Grant, Release, Reserve
from baton.messages import (
    AttemptId,
    DecodeTarget,
    End,
    HandedOff,
    KvEvents,
    Load,
    Prefill,
    Sample,
    TokenLogprobs,
    Tokens,
    Update,
)
from baton.sampling import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_CACHE_SALT_CHARS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from baton.v1 import common_pb2, node_pb2
from kv_transfer.parts import LEASE_BITS, PART_BITS
from tests.cpu_time import takes_less_than

LIMITS = wire.Limits(vocab_size=100, max_model_len=64, max_seconds=30.0, block_size=4, num_layers=2, max_logprobs=20)
WORK = AttemptId(1, "r", 0)
NAN, INF = float("nan"), float("inf")


def prefill() -> node_pb2.RouterMessage:
    target = DecodeTarget("d:1", "d1")
    return wire.write_router_message(Prefill(WORK, "i", (1, 2), (Sample(0),), SamplingParams(), 1.0, target))


def reserve() -> node_pb2.PrefillMessage:
    return wire.write_prefill_message(Reserve(WORK, "i", 5, (b"x" * 32,), 1, 5.0, 8))


def commit() -> node_pb2.PrefillMessage:
    return wire.write_prefill_message(Commit(1, WORK, "i", (1, 2), (Sample(0, (3,)),), SamplingParams(), 5.0))


def grant() -> node_pb2.DecodeMessage:
    return wire.write_decode_message(Grant(WORK, 1, 0, 2, 1))


MAKE = {"prefill": prefill, "reserve": reserve, "commit": commit, "grant": grant}
READ: dict[type[Any], Any] = {
    node_pb2.RouterMessage: wire.read_router_message,
    node_pb2.PrefillMessage: wire.read_prefill_message,
    node_pb2.DecodeMessage: wire.read_decode_message,
}
ids = wire.pack_tokens
ONE, TWO = ids([1]), ids([1, 2])
SAMPLE = common_pb2.Sample
PROMPT = [
    ("prompt_tokens", b"", "prompt: no tokens"),
    ("prompt_tokens", ids([1, 100]), "prompt: token ids must be in"),
    ("prompt_tokens", ids([2**31]), "prompt: token ids must be in"),
    ("prompt_tokens", ids([1] * 65), "prompt: 65 tokens are more than 64"),
    ("cache_salt", "x" * (MAX_CACHE_SALT_CHARS + 1), "cache_salt"),
    ("samples", [], "samples: none"),
    ("samples", [SAMPLE(index=i, output_tokens=ONE) for i in (0, 0)], "samples"),
    ("samples", [SAMPLE(index=1024, output_tokens=ONE)], "samples must be below"),
    ("samples", [SAMPLE(index=i) for i in range(1025)], "samples: 1025"),
    ("samples", [SAMPLE(index=0, output_tokens=ids([100]))], "output_tokens: token ids"),
    ("samples", [SAMPLE(index=i, output_tokens=TWO) for i in (0, 1)], "cannot share one prefill"),
    ("sampling.logit_bias", {100: 1.0}, "token ids of logit_bias"),
    ("sampling.logit_bias", {-1: 1.0}, "logit_bias"),
    ("sampling.logit_bias", {1: NAN}, "logit_bias"),
    ("sampling.logit_bias", {1: -INF}, "logit_bias"),
    ("sampling.logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0), "logit_bias"),
    ("sampling.stop_token_ids", [-1], "stop_token_ids"),
    ("sampling.stop_token_ids", [1] * (MAX_STOP_TOKEN_IDS + 1), "stop_token_ids"),
    ("sampling.allowed_token_ids", [100], "token ids of allowed_token_ids"),
    ("sampling.allowed_token_ids", [-1], "allowed_token_ids"),
    ("sampling.allowed_token_ids", [1] * (MAX_ALLOWED_TOKEN_IDS + 1), "allowed_token_ids"),
    ("sampling.bad_words_token_ids", [ids([100])], "bad_words: token ids"),
    ("sampling.bad_words_token_ids", [b"123"], "bad_words"),
    ("sampling.bad_words_token_ids", [b""], "bad_words"),
    ("sampling.bad_words_token_ids", [TWO] * (MAX_BAD_WORDS + 1), "bad_words"),
    ("sampling.bad_words_token_ids", [b"1" * 4 * MAX_BAD_WORD_TOKENS, TWO], "bad_words"),
    ("sampling.top_k", -1, "top_k"),
    ("sampling.temperature", NAN, "temperature"),
    ("sampling.min_p", INF, "min_p"),
    ("sampling.max_tokens", 0, "max_tokens"),
    ("sampling.num_logprobs", 21, "logprobs must be at most 20, not 21"),
    ("sampling.num_prompt_logprobs", 21, "prompt_logprobs must be at most 20, not 21"),
    ("sampling.logprob_token_ids", [100], "token ids of logprob_token_ids"),
    ("sampling.logprob_token_ids", [1] * 21, "logprob_token_ids"),
    ("target_incarnation", "a\nb", "target_incarnation"),
    *[("deadline_s", value, "deadline_s") for value in (NAN, INF, -1.0)],
]
CASES = [
    *[("prefill", *case) for case in PROMPT],
    *[("commit", *case) for case in PROMPT],
    ("prefill", "decode.incarnation", "", "decode.incarnation"),
    ("prefill", "decode.address", "x" * 513, "decode.address"),
    ("commit", "samples", [SAMPLE(index=0)], "outputs of 0 tokens"),
    ("commit", "sampling.max_tokens", 1, "outputs of 1 tokens, of 1 at most"),
    ("commit", "lease", 0, "lease"),
    ("commit", "lease", 2**39, "lease"),
    ("commit", "age_s", NAN, "age_s"),
    ("prefill", "age_s", -1.0, "age_s"),
    ("reserve", "age_s", INF, "age_s"),
    ("reserve", "num_tokens", 0, "a reserve of 0 tokens"),
    ("reserve", "num_tokens", 8, "leave none to generate"),
    ("reserve", "num_samples", 1025, "num_samples"),
    ("reserve", "layer_groups", 2**31, "groups of layers"),
    ("reserve", "block_hashes", b"", "block_hashes"),
    ("reserve", "block_hashes", b"x" * 64, "block_hashes"),
    ("reserve", "deadline_s", -1e-9, "deadline_s"),
    ("grant", "lease", 0, "lease"),
    ("grant", "lease", 2**39, "lease"),
    ("grant", "num_parts", 33, "num_parts"),
    ("grant", "credits", 3, "credits"),
    ("grant", "num_held_blocks", 65, "num_held_blocks"),
]


def spoil(kind: str, path: str, value: object):
    """A good message with one field that is not, as its reader parses it."""
    message = MAKE[kind]()
    *way, name = path.split(".")
    field = getattr(message, kind)
    for step in way:
        field = getattr(field, step)
    if isinstance(value, list | dict):
        field.ClearField(name)
        getattr(field, name).update(value) if isinstance(value, dict) else getattr(field, name).extend(value)
    else:
        setattr(field, name, value)
    return type(message).FromString(message.SerializeToString())


@pytest.mark.parametrize(("kind", "path", "value", "text"), CASES)
def test_it_is_refused_by_name_and_is_its_own_works_failure(kind, path, value, text) -> None:
    message = spoil(kind, path, value)
    with pytest.raises(InvalidRequest, match=text):
        READ[type(message)](message, LIMITS)
    assert wire.attempt_of(message) == WORK


@pytest.mark.parametrize("kind", MAKE)
def test_what_keeps_to_the_limits_is_read(kind) -> None:
    message = MAKE[kind]()
    assert READ[type(message)](message, LIMITS) == READ[type(message)](message)


@pytest.mark.parametrize(("given", "read"), [(1e10, 30.0), (29.0, 29.0), (0.0, 0.0)])
@pytest.mark.parametrize("kind", ["prefill", "reserve", "commit"])
def test_no_deadline_is_longer_than_the_nodes(kind, given, read) -> None:
    message = spoil(kind, "deadline_s", given)
    assert READ[type(message)](message, LIMITS).deadline_s == read
    assert READ[type(message)](message).deadline_s <= 1e6


def test_a_deadline_that_has_passed_meanwhile_is_told_as_0() -> None:
    late = Prefill(WORK, "i", (1,), (Sample(0),), SamplingParams(), -1e-6)
    assert wire.read_router_message(wire.write_router_message(late)).deadline_s == 0.0
    for message in (
        Reserve(WORK, "i", 5, (), 1, -1e-6, 8),
        Commit(1, WORK, "i", (1, 2), (Sample(0, (3,)),), SamplingParams(), -1e-6),
    ):
        assert wire.read_prefill_message(wire.write_prefill_message(message)).deadline_s == 0.0


def test_serials_of_leases_and_parts_are_those_that_tags_have_room_for() -> None:
    assert (wire.limits.MAX_LEASES, wire.limits.MAX_PARTS) == (1 << LEASE_BITS, 1 << PART_BITS)


@pytest.mark.parametrize(
    "message",
    [
        wire.write_decode_message(Credit(2**39, 1)),
        wire.write_decode_message(Credit(1, 33)),
        wire.write_prefill_message(Release(AttemptId(1, "", 0))),
        wire.write_prefill_message(Release(AttemptId(1, "x" * 600, 0))),
    ],
)
def test_what_names_no_work_is_nobodys_failure(message) -> None:
    with pytest.raises(InvalidRequest):
        READ[type(message)](message, LIMITS)
    assert wire.attempt_of(message) is None


def test_a_commit_reply_without_a_lease_is_its_works_failure() -> None:
    message = wire.write_decode_message(CommitReply(0, WORK))
    with pytest.raises(InvalidRequest, match="lease"):
        wire.read_decode_message(message, LIMITS)
    assert wire.attempt_of(message) == WORK


@pytest.mark.parametrize(
    "kind",
    [
        Tokens(0, 0, (100,)),
        Tokens(0, 0, (2**32 - 1,)),
        Tokens(0, 64, (1,)),
        Tokens(1024, 0, (1,)),
        Tokens(0, 0, (1,), (TokenLogprobs(NAN),)),
        Tokens(0, 0, (1,), (TokenLogprobs(INF),)),
        Tokens(0, 0, (1,), (TokenLogprobs(-1.0, ((1, -1.0), (2, NAN))),)),
        Tokens(0, 0, (1,), (TokenLogprobs(-1.0, ((100, -1.0),)),)),
        Tokens(0, 0, (1,), (TokenLogprobs(-1.0, tuple((i, -1.0) for i in range(21))),)),
        HandedOff(NAN),
        HandedOff(0.0, -1.0),
    ],
)
def test_an_update_that_makes_no_sense_ends_its_own_work_and_no_other(kind) -> None:
    good = Update(AttemptId(1, "other", 0), Tokens(0, 63, (99,), (TokenLogprobs(-INF, ((1, -INF),)),)))
    message = wire.write_node_message((Update(WORK, kind), good))
    updates = wire.read_node_message(node_pb2.NodeMessage.FromString(message.SerializeToString()), LIMITS)
    assert isinstance(updates, tuple)
    bad, other = updates
    assert other == good
    assert bad.attempt_id == WORK
    assert isinstance(bad.kind, End)
    assert isinstance(bad.kind.error, NodeUnavailable)


LAYER = {"num_kv_heads": 2, "head_dim_k": 1, "head_dim_v": 1, "dtype": "float32"}


@pytest.mark.parametrize("field", ["target_itl_s", "prompt_tokens_per_s"])
@pytest.mark.parametrize("value", [NAN, INF, -1.0])
def test_a_load_has_finite_times_and_rates(field: str, value: float) -> None:
    load = node_pb2.Load()
    setattr(load, field, value)
    with pytest.raises(InvalidRequest, match=field):
        wire.read_node_message(node_pb2.NodeMessage(load=load))


@pytest.mark.parametrize(("said", "rate"), [(0.0, 0.0), (5e-324, 0.0), (1e-9, 0.0), (0.5, 0.5), (1e300, 1e300)])
def test_a_rate_at_which_nothing_is_ever_computed_is_not_known(said: float, rate: float) -> None:
    load = wire.read_node_message(node_pb2.NodeMessage(load=node_pb2.Load(prompt_tokens_per_s=said)))
    assert load == Load(prompt_tokens_per_s=rate)


def node_info(**changes: object) -> common_pb2.NodeInfo:
    layout = {"layers": [LAYER] * 2, "block_size": 4}
    names = dict.fromkeys(("incarnation", "node_id", "address", "served_model_name"), "x")
    sizes = dict.fromkeys(("max_model_len", "max_num_seqs", "num_blocks", "vocab_size"), 64)
    fields: dict[str, Any] = {"role": 1, "layout": layout, **names, **sizes, **changes}
    return common_pb2.NodeInfo(**fields)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[(name, 0) for name in ("max_model_len", "max_num_seqs", "num_blocks", "vocab_size")],
        ("vocab_size", 2**32 - 1),
        ("max_logprobs", 2**32 - 1),
        *[(name, "") for name in ("incarnation", "node_id", "address", "served_model_name")],
        ("node_id", "a\nlevel=info forged"),
        ("node_id", "x" * 600),
        ("chat_template", "x" * (2**20 + 1)),
        ("special_tokens", {str(i): "x" for i in range(300)}),
        ("endpoints", [{"address": b"x" * 70_000}]),
        ("endpoints", [{}] * 65),
        ("model_aliases", [""]),
        ("model_aliases", ["x"] * 65),
        ("generation_defaults", {"temperature": NAN}),
        ("layout", {"layers": [LAYER] * 2}),
        ("layout", {"block_size": 4}),
        ("layout", {"layers": [LAYER] * 2049, "block_size": 4}),
        ("layout", {"layers": [LAYER | {"num_kv_heads": 0}], "block_size": 4}),
        ("layout", {"layers": [LAYER | {"num_kv_heads": 2**16}], "block_size": 4}),
        ("layout", {"layers": [LAYER | {"head_dim_k": 0, "head_dim_v": 0}], "block_size": 4}),
        ("layout", {"layers": [LAYER | {"dtype": "x" * 600}], "block_size": 4}),
        ("layout", {"layers": [LAYER | {"dtype": "huge"}], "block_size": 4}),
        ("layout", {"layers": [LAYER], "block_size": 4, "ranks": [{"layer_end": 1, "head_end": 1}]}),
        ("layout", {"layers": [LAYER], "block_size": 4, "ranks": [{"layer_end": 1, "head_end": 2}] * 65}),
    ],
)
def test_what_no_node_is_is_refused(field, value) -> None:
    assert wire.read_node_info(node_info()).vocab_size == 64
    with pytest.raises(InvalidRequest):
        wire.read_node_info(node_info(**{field: value}))


@pytest.mark.parametrize("said", [None, 0, 50, 2**31])
def test_a_node_that_does_not_say_how_many_logprobs_it_tells_is_an_older_one(said: int | None) -> None:
    info = wire.read_node_info(node_info(max_logprobs=said))
    assert info.max_logprobs == wire.Limits.of(info).max_logprobs == (20 if said is None else said)


def test_an_errors_text_is_cut() -> None:
    message = node_pb2.Update(attempt_id={"request_id": "r"}, end={"error": {"code": 7, "message": "x" * 100_000}})
    updates = wire.read_node_message(node_pb2.NodeMessage(updates={"updates": [message]}))
    assert isinstance(updates, tuple)
    assert len(updates[0].kind.error.message) < 10_000


def test_many_ids_are_refused_before_anything_is_built_of_them() -> None:
    many = ids(range(1_000_000))
    message = prefill()
    message.prefill.prompt_tokens = many
    message.prefill.sampling.stop_token_ids.extend(range(1_000_000))
    message = node_pb2.RouterMessage.FromString(message.SerializeToString())
    with takes_less_than(0.05):
        with pytest.raises(InvalidRequest, match="1000000 tokens are more than 64"):
            wire.read_router_message(message, LIMITS)
        message.prefill.prompt_tokens = ONE
        with pytest.raises(InvalidRequest, match="stop_token_ids: 1000000 tokens"):
            wire.read_router_message(message, LIMITS)


@pytest.mark.parametrize(
    "params",
    [
        {"stop_token_ids": frozenset(range(MAX_STOP_TOKEN_IDS + 1))},
        {"stop_token_ids": frozenset({2**31})},
        {"logit_bias": dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)},
        {"logit_bias": {2**31: 1.0}},
    ],
)
def test_sampling_has_bounds_wherever_it_is_made(params) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(**params)
    assert refused.value.param in params


def test_whether_a_token_ends_an_answer_is_looked_up_and_not_searched_for() -> None:
    message = prefill()
    message.prefill.sampling.stop_token_ids.extend([3, 1, 2, 1])
    assert wire.read_router_message(message).sampling.stop_token_ids == frozenset({1, 2, 3})


# ---- what a prefix cache holds ----


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"stored": b"x" * 33}, "stored: 33 bytes are not a multiple of 32"),
        ({"removed": b"x" * 31}, "removed: 31 bytes are not a multiple of 32"),
        ({"stored": b"x" * 32 * 1024, "removed": b"x" * 32}, "KV events: more than 1024 block hashes"),
    ],
)
def test_kv_events_that_make_no_sense_are_refused(fields, text) -> None:
    with pytest.raises(InvalidRequest, match=text):
        wire.read_node_message(node_pb2.NodeMessage(kv_events=fields))


def test_as_many_kv_events_as_are_allowed_are_read() -> None:
    message = wire.read_node_message(node_pb2.NodeMessage(kv_events={"stored": b"x" * 32 * 1024}))
    assert isinstance(message, KvEvents)
    assert len(message.stored) == 1024


# ---- random bytes ----

READERS: list[tuple[Any, Any]] = [
    *READ.items(),
    (node_pb2.NodeMessage, wire.read_node_message),
    (common_pb2.NodeInfo, lambda message, _: wire.read_node_info(message)),
]


def seeds() -> list[bytes]:
    kinds = (Tokens(0, 1, (5,), (TokenLogprobs(-1.0, ((1, -2.0),)),)), HandedOff(1.0), End())
    updates = wire.write_node_message(tuple(Update(WORK, kind) for kind in kinds))
    blocks = wire.write_node_message(KvEvents(3, (b"a" * 32, b"b" * 32), (b"c" * 32,), snapshot=True))
    return [m.SerializeToString() for m in (prefill(), reserve(), commit(), grant(), updates, blocks, node_info())]


def mutate(draw: random.Random, data: bytes) -> bytes:
    """Some bytes changed, put in, cut out or repeated."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(changed) + 1)
        match draw.randrange(4):
            case 0:
                changed[at : at + 1] = bytes([draw.choice([0, 1, 127, 128, 255, draw.randrange(256)])])
            case 1:
                changed[at:at] = draw.randbytes(draw.randint(1, 9))
            case 2:
                del changed[at : at + draw.randint(1, 9)]
            case _:
                changed += changed[at : at + 30]
    return bytes(changed)


@pytest.mark.parametrize("seed", range(4))
def test_bytes_are_a_message_or_refused(seed: int) -> None:
    draw, whole, num_read = random.Random(seed), seeds(), 0
    for _ in range(1000):
        data = draw.randbytes(draw.randrange(40)) if draw.random() < 0.1 else mutate(draw, draw.choice(whole))
        for kind, read in READERS:
            try:
                message = kind.FromString(data)
            except DecodeError:
                continue
            try:
                read(message, LIMITS)
                num_read += 1
            except InvalidRequest:
                pass
    assert num_read > 20, "all were refused"
