"""Hypothesis strategies for every message of the shared language."""

import array
import dataclasses

from hypothesis import strategies as st

from baton import errors, messages
from baton import handoff_messages as handoff
from baton.kv_groups import group_layers
from baton.layout import KvLayout, LayerKv
from baton.logits_processors import LogitsProcessor
from baton.node_info import GenerationDefaults, NodeInfo, NodeRole, TransportEndpoint
from baton.priority import MAX_PRIORITY, MIN_PRIORITY
from baton.prompt_logprobs import PromptLogprobs
from baton.sampling import FinishReason, SamplingParams
from baton.structured_output.constraint import StructuredBackend, StructuredKind, StructuredOutput

uint32 = st.integers(0, 2**32 - 1)
some32 = st.integers(1, 2**32 - 1)
int31 = st.integers(0, 2**31 - 1)
uint64 = st.integers(0, 2**64 - 1)
seconds = st.floats(0, 1e6)
printable = st.characters(exclude_categories=("C", "Z"))
text = st.text(printable, max_size=12)
name = st.text(printable, min_size=1, max_size=12)
tokens = st.lists(int31, max_size=40).map(tuple)
some_tokens = st.lists(int31, min_size=1, max_size=40).map(tuple)
prompt = some_tokens.map(lambda ids: array.array("I", ids))
sample = st.integers(0, 1023)
lease = st.integers(1, 2**39 - 1)
num_parts = st.integers(0, 2**23)
errors_ = st.builds(
    lambda kind, message: kind(message),
    st.sampled_from([errors.InvalidRequest, errors.Overloaded, errors.LayoutMismatch, errors.PeerLost]),
    name,
)
maybe_error = st.none() | errors_
attempt_id = st.builds(messages.AttemptId, uint64, name, uint32)


@st.composite
def sampling(draw: st.DrawFn, least: int = 1) -> SamplingParams:
    max_tokens = draw(st.integers(least, 2**31 - 1))
    named = draw(st.lists(int31, max_size=4).map(tuple))
    return SamplingParams(
        temperature=draw(st.floats(0, 100)),
        top_p=draw(st.floats(0, 1, exclude_min=True)),
        top_k=draw(int31),
        min_p=draw(st.floats(0, 1)),
        repetition_penalty=draw(st.floats(0.1, 10)),
        presence_penalty=draw(st.floats(-2, 2)),
        frequency_penalty=draw(st.floats(-2, 2)),
        logit_bias=draw(st.dictionaries(int31, st.floats(-100, 100), max_size=4)),
        seed=draw(uint64),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=draw(st.frozensets(int31, max_size=4)),
        num_logprobs=len(named) or draw(st.integers(-1, 20)),
        logprob_token_ids=named,
        num_prompt_logprobs=draw(st.none() | st.integers(0, 20)),
        structured_outputs=draw(st.none() | st.builds(StructuredOutput, st.sampled_from(StructuredKind), name)),
        allowed_token_ids=draw(st.frozensets(int31, max_size=4)),
        bad_words_token_ids=draw(st.lists(st.lists(int31, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple)),
        logits_processors=draw(st.lists(st.builds(LogitsProcessor, name, text), max_size=3).map(tuple)),
    )


beam_search = st.builds(
    SamplingParams,
    temperature=st.just(0.0),
    max_tokens=st.integers(2, 2**31 - 1),
    ignore_eos=st.booleans(),
    beam_width=st.integers(1, 10),
    length_penalty=st.floats(-10, 10),
)


@st.composite
def samples(draw: st.DrawFn, length: int) -> tuple[messages.Sample, ...]:
    indexes = draw(st.lists(sample, min_size=1, max_size=4, unique=True))
    output = st.lists(int31, min_size=length, max_size=length).map(tuple)
    return tuple(messages.Sample(index, draw(output)) for index in indexes)


one_sample = st.builds(messages.Sample, sample, some_tokens).map(lambda one: (one,))
target = st.builds(messages.DecodeTarget, name, name)
prefill = st.builds(
    messages.Prefill,
    attempt_id,
    text,
    prompt,
    samples(0) | one_sample,
    sampling() | beam_search,
    seconds,
    st.none() | target,
    text,
    st.integers(MIN_PRIORITY, MAX_PRIORITY),
    seconds,
)
abort = st.builds(messages.Abort, attempt_id, st.lists(sample, max_size=4).map(tuple), seconds)
subscribe = st.builds(messages.Subscribe, uint64, text, uint32)
migrate = st.builds(messages.Migrate, attempt_id, st.integers(1, 2**20 - 1), target)
router_message = prefill | abort | subscribe | migrate

logprob = st.floats(-1e6, 0, width=32)
logprobs_entry = st.builds(messages.TokenLogprobs, logprob, st.lists(st.tuples(int31, logprob), max_size=4).map(tuple))


@st.composite
def said_tokens(draw: st.DrawFn) -> messages.Tokens:
    ids = draw(tokens)
    logprobs = draw(st.just(()) | st.tuples(*[logprobs_entry] * len(ids)))
    return messages.Tokens(draw(sample), draw(st.integers(0, 10**9)), ids, logprobs)


@st.composite
def prompt_logprobs(draw: st.DrawFn) -> PromptLogprobs:
    count, num_top = draw(st.integers(1, 5)), draw(st.integers(0, 20))
    sizes = [count, count, count * num_top, count * num_top]
    numbers = [array.array(kind, [1] * size).tobytes() for kind, size in zip("fIIf", sizes, strict=True)]
    return PromptLogprobs(draw(st.integers(1, 10**9)), num_top, *numbers)


update_kind = st.one_of(
    prompt_logprobs(),
    st.builds(messages.Started, uint32, seconds),
    said_tokens(),
    st.builds(messages.SampleEnd, sample, st.sampled_from(FinishReason), st.none() | int31),
    st.builds(messages.HandedOff, seconds, seconds, seconds),
    st.builds(messages.Adopted, seconds, uint32, uint64, seconds, seconds, seconds),
    st.builds(messages.Stayed, uint32, maybe_error.filter(bool)),
    st.builds(messages.End, maybe_error),
)
updates = st.lists(st.builds(messages.Update, attempt_id, update_kind), max_size=4).map(tuple)
block_hashes = st.lists(st.binary(min_size=32, max_size=32), max_size=4).map(tuple)
node_message = st.one_of(
    updates,
    st.builds(messages.KvEvents, uint64, block_hashes, block_hashes, st.booleans()),
    st.builds(messages.Load, uint32, uint32, uint32, uint32),
    st.builds(messages.Subscribed, text, uint32),
)

dtype = st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"])
layer_kv = st.builds(
    LayerKv,
    st.integers(1, 65535),
    st.integers(1, 2**32 - 1),
    uint32,
    dtype,
    st.none() | st.integers(1, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.sampled_from(["", "float8_e8m0fnu"]),
)


window = st.sampled_from([None, 8])


@st.composite
def layouts(draw: st.DrawFn) -> KvLayout:
    layers = draw(st.lists(layer_kv, min_size=1, max_size=3).map(tuple))
    if draw(st.booleans()):  # layers that differ only in their windows, in several groups
        layers = tuple(dataclasses.replace(layers[0], sliding_window=draw(window)) for _ in range(4))
    layout = KvLayout(layers, draw(some32), draw(text), groups=group_layers(layers))
    by_layer = tuple(layout.whole._replace(layer_start=at, layer_end=at + 1) for at in range(layout.num_layers))
    return dataclasses.replace(layout, ranks=draw(st.sampled_from([(), by_layer, by_layer * 2])))


layout = layouts()
endpoints = st.lists(st.builds(TransportEndpoint, uint32, text, st.binary(max_size=40)), max_size=3).map(tuple)
hello = st.builds(handoff.Hello, name, text, layout, endpoints, text, uint32, maybe_error, uint32)
prefill_message = st.one_of(
    hello,
    st.just(handoff.Heartbeat()),
    st.builds(
        handoff.Reserve,
        attempt_id,
        text,
        st.integers(4, 2**23),
        block_hashes,
        st.integers(1, 1024),
        seconds,
        st.integers(2**24, 2**32 - 1),
        priority=st.integers(MIN_PRIORITY, MAX_PRIORITY),
        move=st.integers(0, 2**20 - 1),
        age_s=seconds,
        goes_on=st.booleans(),
    ),
    st.builds(handoff.Commit, lease, attempt_id, text, prompt, samples(1), sampling(2), seconds, text, seconds),
    st.builds(handoff.Commit, lease, attempt_id, text, prompt, samples(0), beam_search, seconds, text, seconds),
    st.builds(handoff.Release, attempt_id),
)


@st.composite
def grant(draw: st.DrawFn) -> handoff.Grant:
    parts = draw(num_parts)
    others = draw(st.lists(int31, max_size=3).map(tuple))
    return handoff.Grant(draw(attempt_id), draw(lease), draw(int31), parts, draw(st.integers(0, parts)), False, others)


decode_message = st.one_of(
    hello,
    st.just(handoff.Heartbeat()),
    grant(),
    st.builds(handoff.Credit, lease, num_parts),
    st.builds(handoff.Refuse, attempt_id, errors_),
    st.builds(handoff.Landed, lease, attempt_id),
    st.builds(handoff.CommitReply, lease, attempt_id, maybe_error),
)

maybe_float = st.none() | st.floats(-10, 10)
maybe_int = st.none() | int31
node_info = st.builds(
    NodeInfo,
    role=st.sampled_from(NodeRole),
    incarnation=name,
    node_id=name,
    address=name,
    served_model_name=name,
    max_model_len=st.integers(1, 2**31),
    max_num_seqs=st.integers(1, 2**31),
    num_blocks=st.integers(1, 2**31),
    layout=layout,
    endpoints=endpoints,
    tokenizer_digest=text,
    chat_template=text,
    special_tokens=st.dictionaries(text, text, max_size=3),
    generation_defaults=st.builds(
        GenerationDefaults,
        eos_token_ids=st.lists(int31, max_size=3).map(tuple),
        temperature=maybe_float,
        top_p=maybe_float,
        top_k=maybe_int,
        min_p=maybe_float,
        repetition_penalty=maybe_float,
        max_new_tokens=maybe_int,
    ),
    vocab_size=st.integers(1, 2**31),
    protocol_version=uint32,
    version=text,
    structured_outputs_backend=st.sampled_from(StructuredBackend),
    metrics_address=text,
    model_aliases=st.lists(name, max_size=2).map(tuple),
)
