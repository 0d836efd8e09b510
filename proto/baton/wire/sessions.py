"""Messages of a session: one router and one node."""

from __future__ import annotations

from collections.abc import Iterable

from baton.errors import InvalidRequest
from baton.messages import (
    Abort,
    Adopted,
    DecodeTarget,
    End,
    HandedOff,
    Load,
    Prefill,
    SampleEnd,
    Started,
    Subscribe,
    Subscribed,
    Tokens,
    Update,
    UpdateKind,
)
from baton.v1 import node_pb2
from baton.wire import values

RouterToNode = Subscribe | Prefill | Abort
NodeToRouter = Subscribed | Load | tuple[Update, ...]
"""A tuple is all that one engine step has to tell one router."""


def write_router_message(message: RouterToNode) -> node_pb2.RouterMessage:
    match message:
        case Prefill():
            return node_pb2.RouterMessage(prefill=write_prefill(message))
        case Abort(work, samples, deadline_s):
            abort = node_pb2.Abort(work=values.write_work(work), samples=samples, deadline_s=deadline_s)
            return node_pb2.RouterMessage(abort=abort)
        case Subscribe(epoch, target, version):
            wire = node_pb2.Subscribe(protocol_version=version, router_epoch=epoch, target_incarnation=target)
            return node_pb2.RouterMessage(subscribe=wire)


def read_router_message(wire: node_pb2.RouterMessage) -> RouterToNode:
    """Raises InvalidRequest for a message that is empty, of a newer kind, or malformed."""
    match wire.WhichOneof("kind"):
        case "prefill":
            return read_prefill(wire.prefill)
        case "abort":
            abort = wire.abort
            return Abort(values.read_work(abort.work), tuple(abort.samples), abort.deadline_s)
        case "subscribe":
            said = wire.subscribe
            return Subscribe(said.router_epoch, said.target_incarnation, said.protocol_version)
        case _:
            raise InvalidRequest("a router's message of no known kind")


def write_prefill(message: Prefill) -> node_pb2.Prefill:
    return node_pb2.Prefill(
        work=values.write_work(message.work),
        target_incarnation=message.target_incarnation,
        prompt_tokens=values.pack_tokens(message.prompt_tokens, "prompt"),
        samples=values.write_samples(message.samples),
        sampling=values.write_sampling(message.sampling),
        deadline_s=message.deadline_s,
        decode=_write_target(message.decode) if message.decode else None,
        cache_salt=message.cache_salt,
    )


def _write_target(target: DecodeTarget) -> node_pb2.DecodeTarget:
    return node_pb2.DecodeTarget(address=target.address, incarnation=target.incarnation)


def read_prefill(wire: node_pb2.Prefill) -> Prefill:
    prompt = values.unpack_tokens(wire.prompt_tokens, "prompt")
    if not prompt:
        raise InvalidRequest("prompt: no tokens", "prompt")
    samples = values.read_samples(wire.samples)
    if len(samples) > 1 and samples[0].output_tokens:
        raise InvalidRequest("samples: several with output cannot share one prefill", "samples")
    return Prefill(
        work=values.read_work(wire.work),
        target_incarnation=wire.target_incarnation,
        prompt_tokens=prompt,
        samples=samples,
        sampling=values.read_sampling(wire.sampling),
        deadline_s=values.read_seconds(wire.deadline_s, "deadline_s"),
        decode=DecodeTarget(wire.decode.address, wire.decode.incarnation) if wire.HasField("decode") else None,
        cache_salt=wire.cache_salt,
    )


def write_node_message(message: NodeToRouter) -> node_pb2.NodeMessage:
    match message:
        case tuple():
            return node_pb2.NodeMessage(updates=write_updates(message))
        case Load(waiting, running, free, total):
            wire = node_pb2.Load(num_waiting=waiting, num_running=running, num_blocks_free=free, num_blocks_total=total)
            return node_pb2.NodeMessage(load=wire)
        case Subscribed(incarnation, version):
            return node_pb2.NodeMessage(
                subscribed=node_pb2.Subscribed(protocol_version=version, incarnation=incarnation)
            )


def read_node_message(wire: node_pb2.NodeMessage) -> NodeToRouter:
    """Raises InvalidRequest for a message that is empty, of a newer kind, or malformed."""
    match wire.WhichOneof("kind"):
        case "updates":
            return tuple(read_update(update) for update in wire.updates.updates)
        case "load":
            load = wire.load
            return Load(load.num_waiting, load.num_running, load.num_blocks_free, load.num_blocks_total)
        case "subscribed":
            return Subscribed(wire.subscribed.incarnation, wire.subscribed.protocol_version)
        case _:
            raise InvalidRequest("a node's message of no known kind")


def write_updates(updates: Iterable[Update]) -> node_pb2.Updates:
    return node_pb2.Updates(updates=[write_update(update) for update in updates])


def write_update(update: Update) -> node_pb2.Update:
    work = values.write_work(update.work)
    match update.kind:
        case Tokens() as said:
            return node_pb2.Update(work=work, tokens=_write_tokens(said))
        case SampleEnd(sample, reason, stop_id):
            ended = node_pb2.SampleEnd(sample=sample, reason=values.write_finish_reason(reason), stop_token_id=stop_id)
            return node_pb2.Update(work=work, sample_end=ended)
        case Started(cached, queue_s):
            return node_pb2.Update(work=work, started=node_pb2.Started(num_cached_tokens=cached, queue_s=queue_s))
        case HandedOff(prefill_s, gather_s, wire_s):
            handed_off = node_pb2.HandedOff(prefill_s=prefill_s, gather_s=gather_s, wire_s=wire_s)
            return node_pb2.Update(work=work, handed_off=handed_off)
        case Adopted() as said:
            return node_pb2.Update(work=work, adopted=_write_adopted(said))
        case End(error):
            return node_pb2.Update(work=work, end=node_pb2.End(error=values.write_error(error)))


def read_update(wire: node_pb2.Update) -> Update:
    return Update(values.read_work(wire.work), _read_kind(wire))


def _read_kind(wire: node_pb2.Update) -> UpdateKind:
    match wire.WhichOneof("kind"):
        case "tokens":
            return _read_tokens(wire.tokens)
        case "sample_end":
            ended = wire.sample_end
            stop_id = ended.stop_token_id if ended.HasField("stop_token_id") else None
            return SampleEnd(ended.sample, values.read_finish_reason(ended.reason), stop_id)
        case "started":
            return Started(wire.started.num_cached_tokens, wire.started.queue_s)
        case "handed_off":
            return HandedOff(wire.handed_off.prefill_s, wire.handed_off.gather_s, wire.handed_off.wire_s)
        case "adopted":
            return _read_adopted(wire.adopted)
        case "end":
            return End(values.read_error(wire.end.error) if wire.end.HasField("error") else None)
        case _:
            raise InvalidRequest("an update of no known kind")


def _write_adopted(said: Adopted) -> node_pb2.Adopted:
    return node_pb2.Adopted(
        transfer_s=said.transfer_s,
        num_cached_tokens=said.num_cached_tokens,
        transfer_bytes=said.transfer_bytes,
        commit_s=said.commit_s,
        scatter_s=said.scatter_s,
        step_wait_s=said.step_wait_s,
    )


def _read_adopted(wire: node_pb2.Adopted) -> Adopted:
    return Adopted(
        wire.transfer_s,
        wire.num_cached_tokens,
        wire.transfer_bytes,
        wire.commit_s,
        wire.scatter_s,
        wire.step_wait_s,
    )


def _write_tokens(said: Tokens) -> node_pb2.Tokens:
    return node_pb2.Tokens(
        sample=said.sample,
        first_index=said.first_index,
        token_ids=values.pack_tokens(said.token_ids),
        logprobs=values.write_logprobs(said.logprobs),
    )


def _read_tokens(wire: node_pb2.Tokens) -> Tokens:
    token_ids = values.unpack_tokens(wire.token_ids)
    logprobs = values.read_logprobs(wire.logprobs)
    if logprobs and len(logprobs) != len(token_ids):
        raise InvalidRequest(f"{len(token_ids)} tokens with {len(logprobs)} logprobs", "logprobs")
    return Tokens(wire.sample, wire.first_index, token_ids, logprobs)
