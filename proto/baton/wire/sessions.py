"""Messages of a session, between a router and a node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from baton.block_hash import HASH_BYTES
from baton.errors import InvalidRequest, NodeUnavailable
from baton.messages import (
    Abort,
    Adopted,
    Auth,
    DecodeTarget,
    End,
    HandedOff,
    KvEvents,
    Load,
    Migrate,
    Prefill,
    SampleEnd,
    Started,
    Stayed,
    Subscribe,
    Subscribed,
    Tokens,
    Update,
    UpdateKind,
)
from baton.prompt_logprobs import PromptLogprobs
from baton.v1 import node_pb2
from baton.wire import values
from baton.wire.limits import ANY, MAX_KV_EVENTS, MAX_MOVES, MAX_SAMPLES, Limits
from baton.wire.node_times import read_decode_times, read_prompt_times, write_decode_times, write_prompt_times
from baton.wire.prompt_logprobs import read_prompt_logprobs, write_prompt_logprobs
from baton.wire.sampling import read_sampling, write_sampling

RouterToNode = Auth | Subscribe | Prefill | Abort | Migrate
NodeToRouter = Auth | Subscribed | Load | KvEvents | tuple[Update, ...]
"""A tuple holds updates for one router, of one or more engine steps."""


def write_router_message(message: RouterToNode) -> node_pb2.RouterMessage:
    match message:
        case Prefill():
            return node_pb2.RouterMessage(prefill=write_prefill(message))
        case Abort(attempt_id, samples, deadline_s):
            abort = node_pb2.Abort(
                attempt_id=values.write_attempt_id(attempt_id),
                samples=samples,
                deadline_s=values.write_time_left(deadline_s),
            )
            return node_pb2.RouterMessage(abort=abort)
        case Migrate(attempt_id, move, target):
            migrate = node_pb2.Migrate(
                attempt_id=values.write_attempt_id(attempt_id), move=move, target=_write_target(target)
            )
            return node_pb2.RouterMessage(migrate=migrate)
        case Subscribe(epoch, target, version):
            wire = node_pb2.Subscribe(protocol_version=version, router_epoch=epoch, target_incarnation=target)
            return node_pb2.RouterMessage(subscribe=wire)
        case Auth():
            return node_pb2.RouterMessage(auth=values.write_auth(message))


def read_router_message(wire: node_pb2.RouterMessage, limits: Limits = ANY) -> RouterToNode:
    """Raises InvalidRequest for a message that is empty, a batch, of a newer kind, malformed, or beyond the node's
    limits."""
    match wire.WhichOneof("kind"):
        case "prefill":
            return read_prefill(wire.prefill, limits)
        case "abort":
            abort = wire.abort
            return Abort(
                values.read_attempt_id(abort.attempt_id),
                values.read_indexes(abort.samples),
                values.read_seconds(abort.deadline_s, "deadline_s", limits.max_seconds),
            )
        case "migrate":
            attempt_id = values.read_attempt_id(wire.migrate.attempt_id)
            move = values.read_below(wire.migrate.move, MAX_MOVES, "move")
            if not move:
                raise InvalidRequest("move: it is counted from 1", "move")
            return Migrate(attempt_id, move, _read_target(wire.migrate.target))
        case "subscribe":
            said = wire.subscribe
            target = values.read_text(said.target_incarnation, "target_incarnation")
            return Subscribe(said.router_epoch, target, said.protocol_version)
        case "auth":
            return values.read_auth(wire.auth)
        case _:
            raise InvalidRequest("a router's message of no known kind")


def join_router_messages(messages: Sequence[node_pb2.RouterMessage]) -> node_pb2.RouterMessage:
    """As one: at both ends, a message costs more than what it says."""
    if len(messages) == 1:
        return messages[0]
    return node_pb2.RouterMessage(batch=node_pb2.RouterMessageBatch(messages=messages))


def split_router_message(wire: node_pb2.RouterMessage) -> Sequence[node_pb2.RouterMessage]:
    """The reverse of `join_router_messages`. Each is still to be read."""
    return wire.batch.messages if wire.WhichOneof("kind") == "batch" else (wire,)


def write_prefill(message: Prefill) -> node_pb2.Prefill:
    return node_pb2.Prefill(
        attempt_id=values.write_attempt_id(message.attempt_id),
        target_incarnation=message.target_incarnation,
        prompt_tokens=values.pack_tokens(message.prompt_tokens, "prompt"),
        samples=values.write_samples(message.samples),
        sampling=write_sampling(message.sampling),
        deadline_s=values.write_time_left(message.deadline_s),
        decode=_write_target(message.decode) if message.decode else None,
        cache_salt=message.cache_salt,
        priority=message.priority,
        age_s=message.age_s,
    )


def _write_target(target: DecodeTarget) -> node_pb2.DecodeTarget:
    return node_pb2.DecodeTarget(address=target.address, incarnation=target.incarnation)


def read_prefill(wire: node_pb2.Prefill, limits: Limits = ANY) -> Prefill:
    prompt = values.read_prompt(wire.prompt_tokens, limits)
    if not prompt:
        raise InvalidRequest("prompt: no tokens", "prompt")
    return Prefill(
        attempt_id=values.read_attempt_id(wire.attempt_id),
        target_incarnation=values.read_text(wire.target_incarnation, "target_incarnation"),
        prompt_tokens=prompt,
        samples=values.read_samples(wire.samples, limits, most_shared=0),
        sampling=read_sampling(wire.sampling, limits),
        deadline_s=values.read_seconds(wire.deadline_s, "deadline_s", limits.max_seconds),
        decode=_read_target(wire.decode) if wire.HasField("decode") else None,
        cache_salt=values.read_salt(wire.cache_salt),
        priority=wire.priority,
        age_s=values.read_seconds(wire.age_s, "age_s"),
    )


def _read_target(wire: node_pb2.DecodeTarget) -> DecodeTarget:
    return DecodeTarget(
        values.read_name(wire.address, "decode.address"), values.read_name(wire.incarnation, "decode.incarnation")
    )


def write_node_message(message: NodeToRouter) -> node_pb2.NodeMessage:
    match message:
        case tuple():
            wire = node_pb2.NodeMessage()
            wire.updates.SetInParent()
            for update in message:
                _fill_update(wire.updates.updates.add(), update)
            return wire
        case Load() as load:
            return node_pb2.NodeMessage(load=_write_load(load))
        case KvEvents() as events:
            return node_pb2.NodeMessage(kv_events=_write_kv_events(events))
        case Subscribed(incarnation, version):
            return node_pb2.NodeMessage(
                subscribed=node_pb2.Subscribed(protocol_version=version, incarnation=incarnation)
            )
        case Auth():
            return node_pb2.NodeMessage(auth=values.write_auth(message))


def read_node_message(wire: node_pb2.NodeMessage, limits: Limits = ANY) -> NodeToRouter:
    """Raises InvalidRequest for a message that is empty, of a newer kind, or malformed. `limits`: those of the node."""
    match wire.WhichOneof("kind"):
        case "updates":
            return tuple([read_update(update, limits) for update in wire.updates.updates])
        case "load":
            load = wire.load
            blocks = load.num_blocks_free, load.num_blocks_total
            target_itl_s = values.read_seconds(load.target_itl_s, "target_itl_s")
            rate = values.read_rate(load.prompt_tokens_per_s, "prompt_tokens_per_s")
            waiting = load.num_waiting_tokens
            return Load(load.num_waiting, load.num_running, *blocks, load.draining, waiting, target_itl_s, rate)
        case "kv_events":
            return _read_kv_events(wire.kv_events)
        case "subscribed":
            incarnation = values.read_text(wire.subscribed.incarnation, "incarnation")
            return Subscribed(incarnation, wire.subscribed.protocol_version)
        case "auth":
            return values.read_auth(wire.auth)
        case _:
            raise InvalidRequest("a node's message of no known kind")


def _write_load(load: Load) -> node_pb2.Load:
    return node_pb2.Load(
        num_waiting=load.num_waiting,
        num_running=load.num_running,
        num_blocks_free=load.num_blocks_free,
        num_blocks_total=load.num_blocks_total,
        draining=load.draining,
        num_waiting_tokens=load.num_waiting_tokens,
        target_itl_s=load.target_itl_s,
        prompt_tokens_per_s=load.prompt_tokens_per_s,
    )


def _write_kv_events(events: KvEvents) -> node_pb2.KvEvents:
    return node_pb2.KvEvents(
        sequence=events.sequence,
        snapshot=events.snapshot,
        removed=values.write_hashes(events.removed),
        stored=values.write_hashes(events.stored),
    )


def _read_kv_events(wire: node_pb2.KvEvents) -> KvEvents:
    """Raises InvalidRequest before building anything from too many hashes."""
    if len(wire.removed) + len(wire.stored) > HASH_BYTES * MAX_KV_EVENTS:
        raise InvalidRequest(f"KV events: more than {MAX_KV_EVENTS} block hashes", "stored")
    removed, stored = values.read_hashes(wire.removed, "removed"), values.read_hashes(wire.stored, "stored")
    return KvEvents(wire.sequence, stored, removed, wire.snapshot)


def write_update(update: Update) -> node_pb2.Update:
    wire = node_pb2.Update()
    _fill_update(wire, update)
    return wire


def _fill_update(wire: node_pb2.Update, update: Update) -> None:
    """Fill an empty message. A step has hundreds of tokens to report, and to construct messages in order to copy them
    into others takes more than twice the time."""
    attempt_id = wire.attempt_id
    attempt_id.router_epoch, attempt_id.request_id, attempt_id.attempt = update.attempt_id
    match update.kind:
        case Tokens(sample, first_index, token_ids, logprobs):
            tokens = wire.tokens
            tokens.sample, tokens.first_index, tokens.token_ids = sample, first_index, values.pack_tokens(token_ids)
            for entry in logprobs:
                values.fill_token_logprobs(tokens.logprobs.add(), entry)
        case SampleEnd(sample, reason, stop_id):
            ended = node_pb2.SampleEnd(sample=sample, reason=values.write_finish_reason(reason), stop_token_id=stop_id)
            wire.sample_end.CopyFrom(ended)
        case PromptLogprobs() as said:
            wire.prompt_logprobs.CopyFrom(write_prompt_logprobs(said))
        case Started(cached, queue_s):
            wire.started.CopyFrom(node_pb2.Started(num_cached_tokens=cached, queue_s=queue_s))
        case HandedOff(prefill_s, gather_s, wire_s, prompt):
            times = write_prompt_times(prompt)
            handed_off = node_pb2.HandedOff(prefill_s=prefill_s, gather_s=gather_s, wire_s=wire_s, prompt=times)
            wire.handed_off.CopyFrom(handed_off)
        case Adopted() as said:
            wire.adopted.CopyFrom(_write_adopted(said))
        case Stayed(move, why):
            wire.stayed.CopyFrom(node_pb2.Stayed(move=move, error=values.write_error(why)))
        case End() as said:
            wire.end.CopyFrom(_write_end(said))


def read_update(wire: node_pb2.Update, limits: Limits = ANY) -> Update:
    """A malformed update becomes the end of its attempt alone. Raises InvalidRequest if it does not name its
    attempt."""
    attempt_id, kind = values.read_attempt_id(wire.attempt_id), wire.WhichOneof("kind")
    try:
        if kind is None:
            raise InvalidRequest("an update of no known kind")
        return Update(attempt_id, _READERS[kind](getattr(wire, kind), limits))
    except InvalidRequest as error:
        return Update(attempt_id, End(NodeUnavailable(f"the node's update makes no sense: {error.message}")))


def _read_started(wire: node_pb2.Started, _: Limits) -> Started:
    return Started(wire.num_cached_tokens, values.read_seconds(wire.queue_s, "queue_s"))


def _read_handed_off(wire: node_pb2.HandedOff, _: Limits) -> HandedOff:
    return HandedOff(
        values.read_seconds(wire.prefill_s, "prefill_s"),
        values.read_seconds(wire.gather_s, "gather_s"),
        values.read_seconds(wire.wire_s, "wire_s"),
        read_prompt_times(wire.prompt) if wire.HasField("prompt") else None,
    )


def _read_stayed(wire: node_pb2.Stayed, _: Limits) -> Stayed:
    return Stayed(wire.move, values.read_error(wire.error))


def _write_end(said: End) -> node_pb2.End:
    prompt, decode = write_prompt_times(said.prompt), write_decode_times(said.decode)
    return node_pb2.End(error=values.write_error(said.error), prompt=prompt, decode=decode)


def _read_end(wire: node_pb2.End, _: Limits) -> End:
    error = values.read_error(wire.error) if wire.HasField("error") else None
    prompt = read_prompt_times(wire.prompt) if wire.HasField("prompt") else None
    return End(error, prompt, read_decode_times(wire.decode) if wire.HasField("decode") else None)


def _read_sample_end(wire: node_pb2.SampleEnd, _: Limits) -> SampleEnd:
    sample = values.read_below(wire.sample, MAX_SAMPLES, "sample")
    stop_id = wire.stop_token_id if wire.HasField("stop_token_id") else None
    if stop_id is not None and stop_id < 0:
        raise InvalidRequest(f"stop_token_id must be 0 or more, not {stop_id}", "stop_token_id")
    return SampleEnd(sample, values.read_finish_reason(wire.reason), stop_id)


def _write_adopted(said: Adopted) -> node_pb2.Adopted:
    return node_pb2.Adopted(
        transfer_s=said.transfer_s,
        num_cached_tokens=said.num_cached_tokens,
        transfer_bytes=said.transfer_bytes,
        commit_s=said.commit_s,
        scatter_s=said.scatter_s,
        step_wait_s=said.step_wait_s,
    )


def _read_adopted(wire: node_pb2.Adopted, _: Limits) -> Adopted:
    return Adopted(
        values.read_seconds(wire.transfer_s, "transfer_s"),
        wire.num_cached_tokens,
        wire.transfer_bytes,
        values.read_seconds(wire.commit_s, "commit_s"),
        values.read_seconds(wire.scatter_s, "scatter_s"),
        values.read_seconds(wire.step_wait_s, "step_wait_s"),
    )


def _read_tokens(wire: node_pb2.Tokens, limits: Limits) -> Tokens:
    sample, first, data, logprobs = wire.sample, wire.first_index, wire.token_ids, wire.logprobs
    if len(data) == 4 and not logprobs:  # one token, as most updates have
        token_id = int.from_bytes(data, "little")
        if token_id < limits.vocab_size and sample < MAX_SAMPLES and first < limits.max_model_len:
            return Tokens(sample, first, (token_id,))
    token_ids = values.read_tokens(data, limits)
    values.read_below(sample, MAX_SAMPLES, "sample")
    values.read_below(first + len(token_ids), limits.max_model_len + 1, "first_index")
    if not logprobs:
        return Tokens(sample, first, token_ids)
    if len(logprobs) != len(token_ids):
        raise InvalidRequest(f"{len(token_ids)} tokens with {len(logprobs)} logprobs", "logprobs")
    return Tokens(sample, first, token_ids, values.read_logprobs(logprobs, limits))


_READERS: Mapping[str, Callable[[Any, Limits], UpdateKind]] = {
    "tokens": _read_tokens,
    "prompt_logprobs": read_prompt_logprobs,
    "sample_end": _read_sample_end,
    "started": _read_started,
    "handed_off": _read_handed_off,
    "adopted": _read_adopted,
    "stayed": _read_stayed,
    "end": _read_end,
}
"""Of the kinds of update, by the names of their fields. A table, because there is an update for each token."""
