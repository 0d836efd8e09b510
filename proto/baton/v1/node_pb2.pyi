from baton.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    def __init__(self, digest: _Optional[str] = ...) -> None: ...

class TokenizerChunk(_message.Message):
    __slots__ = ("digest", "data")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    digest: str
    data: bytes
    def __init__(self, digest: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class AuditKvRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KvAudit(_message.Message):
    __slots__ = ("node_id", "incarnation", "role", "integrity", "idle", "num_blocks", "num_slots", "holders", "blocks", "slots")
    class NumBlocksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class NumSlotsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INTEGRITY_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: str
    role: _common_pb2.NodeRole
    integrity: str
    idle: bool
    num_blocks: _containers.ScalarMap[str, int]
    num_slots: _containers.ScalarMap[str, int]
    holders: _containers.RepeatedCompositeFieldContainer[KvHolder]
    blocks: _containers.RepeatedCompositeFieldContainer[KvBlock]
    slots: _containers.RepeatedCompositeFieldContainer[KvSlot]
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[_Union[_common_pb2.NodeRole, str]] = ..., integrity: _Optional[str] = ..., idle: _Optional[bool] = ..., num_blocks: _Optional[_Mapping[str, int]] = ..., num_slots: _Optional[_Mapping[str, int]] = ..., holders: _Optional[_Iterable[_Union[KvHolder, _Mapping]]] = ..., blocks: _Optional[_Iterable[_Union[KvBlock, _Mapping]]] = ..., slots: _Optional[_Iterable[_Union[KvSlot, _Mapping]]] = ...) -> None: ...

class KvHolder(_message.Message):
    __slots__ = ("kind", "state", "use", "attempt_id", "samples", "lease", "peer", "age_s")
    KIND_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    USE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    kind: str
    state: str
    use: str
    attempt_id: _common_pb2.AttemptId
    samples: _containers.RepeatedScalarFieldContainer[int]
    lease: int
    peer: str
    age_s: float
    def __init__(self, kind: _Optional[str] = ..., state: _Optional[str] = ..., use: _Optional[str] = ..., attempt_id: _Optional[_Union[_common_pb2.AttemptId, _Mapping]] = ..., samples: _Optional[_Iterable[int]] = ..., lease: _Optional[int] = ..., peer: _Optional[str] = ..., age_s: _Optional[float] = ...) -> None: ...

class KvBlock(_message.Message):
    __slots__ = ("block", "state", "ref", "readers", "writer", "hash", "holders", "age_s")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REF_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    block: int
    state: str
    ref: int
    readers: int
    writer: int
    hash: str
    holders: _containers.RepeatedScalarFieldContainer[int]
    age_s: float
    def __init__(self, block: _Optional[int] = ..., state: _Optional[str] = ..., ref: _Optional[int] = ..., readers: _Optional[int] = ..., writer: _Optional[int] = ..., hash: _Optional[str] = ..., holders: _Optional[_Iterable[int]] = ..., age_s: _Optional[float] = ...) -> None: ...

class KvSlot(_message.Message):
    __slots__ = ("slot", "state", "peer", "lease", "part", "age_s")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    slot: int
    state: str
    peer: str
    lease: int
    part: int
    age_s: float
    def __init__(self, slot: _Optional[int] = ..., state: _Optional[str] = ..., peer: _Optional[str] = ..., lease: _Optional[int] = ..., part: _Optional[int] = ..., age_s: _Optional[float] = ...) -> None: ...

class Auth(_message.Message):
    __slots__ = ("name", "nonce", "proof")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    name: str
    nonce: bytes
    proof: bytes
    def __init__(self, name: _Optional[str] = ..., nonce: _Optional[bytes] = ..., proof: _Optional[bytes] = ...) -> None: ...

class RouterMessage(_message.Message):
    __slots__ = ("subscribe", "prefill", "abort", "auth", "migrate", "batch")
    SUBSCRIBE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    AUTH_FIELD_NUMBER: _ClassVar[int]
    MIGRATE_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    subscribe: Subscribe
    prefill: Prefill
    abort: Abort
    auth: Auth
    migrate: Migrate
    batch: RouterMessageBatch
    def __init__(self, subscribe: _Optional[_Union[Subscribe, _Mapping]] = ..., prefill: _Optional[_Union[Prefill, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., auth: _Optional[_Union[Auth, _Mapping]] = ..., migrate: _Optional[_Union[Migrate, _Mapping]] = ..., batch: _Optional[_Union[RouterMessageBatch, _Mapping]] = ...) -> None: ...

class RouterMessageBatch(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[RouterMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[RouterMessage, _Mapping]]] = ...) -> None: ...

class NodeMessage(_message.Message):
    __slots__ = ("subscribed", "updates", "load", "auth", "kv_events")
    SUBSCRIBED_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    AUTH_FIELD_NUMBER: _ClassVar[int]
    KV_EVENTS_FIELD_NUMBER: _ClassVar[int]
    subscribed: Subscribed
    updates: Updates
    load: Load
    auth: Auth
    kv_events: KvEvents
    def __init__(self, subscribed: _Optional[_Union[Subscribed, _Mapping]] = ..., updates: _Optional[_Union[Updates, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., auth: _Optional[_Union[Auth, _Mapping]] = ..., kv_events: _Optional[_Union[KvEvents, _Mapping]] = ...) -> None: ...

class Subscribe(_message.Message):
    __slots__ = ("protocol_version", "router_epoch", "target_incarnation")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUTER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TARGET_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    router_epoch: int
    target_incarnation: str
    def __init__(self, protocol_version: _Optional[int] = ..., router_epoch: _Optional[int] = ..., target_incarnation: _Optional[str] = ...) -> None: ...

class Subscribed(_message.Message):
    __slots__ = ("protocol_version", "incarnation")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    incarnation: str
    def __init__(self, protocol_version: _Optional[int] = ..., incarnation: _Optional[str] = ...) -> None: ...

class DecodeTarget(_message.Message):
    __slots__ = ("address", "incarnation")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    address: str
    incarnation: str
    def __init__(self, address: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class Prefill(_message.Message):
    __slots__ = ("attempt_id", "target_incarnation", "prompt_tokens", "samples", "sampling", "deadline_s", "decode", "cache_salt", "priority", "age_s")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    attempt_id: _common_pb2.AttemptId
    target_incarnation: str
    prompt_tokens: bytes
    samples: _containers.RepeatedCompositeFieldContainer[_common_pb2.Sample]
    sampling: _common_pb2.SamplingParams
    deadline_s: float
    decode: DecodeTarget
    cache_salt: str
    priority: int
    age_s: float
    def __init__(self, attempt_id: _Optional[_Union[_common_pb2.AttemptId, _Mapping]] = ..., target_incarnation: _Optional[str] = ..., prompt_tokens: _Optional[bytes] = ..., samples: _Optional[_Iterable[_Union[_common_pb2.Sample, _Mapping]]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., deadline_s: _Optional[float] = ..., decode: _Optional[_Union[DecodeTarget, _Mapping]] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ..., age_s: _Optional[float] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("attempt_id", "samples", "deadline_s")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    attempt_id: _common_pb2.AttemptId
    samples: _containers.RepeatedScalarFieldContainer[int]
    deadline_s: float
    def __init__(self, attempt_id: _Optional[_Union[_common_pb2.AttemptId, _Mapping]] = ..., samples: _Optional[_Iterable[int]] = ..., deadline_s: _Optional[float] = ...) -> None: ...

class Migrate(_message.Message):
    __slots__ = ("attempt_id", "move", "target")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    attempt_id: _common_pb2.AttemptId
    move: int
    target: DecodeTarget
    def __init__(self, attempt_id: _Optional[_Union[_common_pb2.AttemptId, _Mapping]] = ..., move: _Optional[int] = ..., target: _Optional[_Union[DecodeTarget, _Mapping]] = ...) -> None: ...

class Updates(_message.Message):
    __slots__ = ("updates",)
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    updates: _containers.RepeatedCompositeFieldContainer[Update]
    def __init__(self, updates: _Optional[_Iterable[_Union[Update, _Mapping]]] = ...) -> None: ...

class Update(_message.Message):
    __slots__ = ("attempt_id", "started", "tokens", "sample_end", "handed_off", "adopted", "end", "prompt_logprobs", "stayed")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_END_FIELD_NUMBER: _ClassVar[int]
    HANDED_OFF_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STAYED_FIELD_NUMBER: _ClassVar[int]
    attempt_id: _common_pb2.AttemptId
    started: Started
    tokens: Tokens
    sample_end: SampleEnd
    handed_off: HandedOff
    adopted: Adopted
    end: End
    prompt_logprobs: PromptLogprobs
    stayed: Stayed
    def __init__(self, attempt_id: _Optional[_Union[_common_pb2.AttemptId, _Mapping]] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., sample_end: _Optional[_Union[SampleEnd, _Mapping]] = ..., handed_off: _Optional[_Union[HandedOff, _Mapping]] = ..., adopted: _Optional[_Union[Adopted, _Mapping]] = ..., end: _Optional[_Union[End, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., stayed: _Optional[_Union[Stayed, _Mapping]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("num_cached_tokens", "queue_s")
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    num_cached_tokens: int
    queue_s: float
    def __init__(self, num_cached_tokens: _Optional[int] = ..., queue_s: _Optional[float] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("sample", "first_index", "token_ids", "logprobs")
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    sample: int
    first_index: int
    token_ids: bytes
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, sample: _Optional[int] = ..., first_index: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("first_index", "num_top", "logprobs", "ranks", "top_token_ids", "top_logprobs")
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_TOP_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    first_index: int
    num_top: int
    logprobs: bytes
    ranks: bytes
    top_token_ids: bytes
    top_logprobs: bytes
    def __init__(self, first_index: _Optional[int] = ..., num_top: _Optional[int] = ..., logprobs: _Optional[bytes] = ..., ranks: _Optional[bytes] = ..., top_token_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_token_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_token_ids: bytes
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_token_ids: _Optional[bytes] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class SampleEnd(_message.Message):
    __slots__ = ("sample", "reason", "stop_token_id")
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    sample: int
    reason: FinishReason
    stop_token_id: int
    def __init__(self, sample: _Optional[int] = ..., reason: _Optional[_Union[FinishReason, str]] = ..., stop_token_id: _Optional[int] = ...) -> None: ...

class HandedOff(_message.Message):
    __slots__ = ("prefill_s", "gather_s", "wire_s", "prompt")
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    GATHER_S_FIELD_NUMBER: _ClassVar[int]
    WIRE_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    prefill_s: float
    gather_s: float
    wire_s: float
    prompt: PromptTimes
    def __init__(self, prefill_s: _Optional[float] = ..., gather_s: _Optional[float] = ..., wire_s: _Optional[float] = ..., prompt: _Optional[_Union[PromptTimes, _Mapping]] = ...) -> None: ...

class PromptTimes(_message.Message):
    __slots__ = ("started_s", "computed_s", "num_chunks", "granted_s", "first_part_s", "last_part_s", "num_parts", "num_held_blocks")
    STARTED_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_S_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    GRANTED_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_PART_S_FIELD_NUMBER: _ClassVar[int]
    LAST_PART_S_FIELD_NUMBER: _ClassVar[int]
    NUM_PARTS_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    started_s: float
    computed_s: float
    num_chunks: int
    granted_s: float
    first_part_s: float
    last_part_s: float
    num_parts: int
    num_held_blocks: int
    def __init__(self, started_s: _Optional[float] = ..., computed_s: _Optional[float] = ..., num_chunks: _Optional[int] = ..., granted_s: _Optional[float] = ..., first_part_s: _Optional[float] = ..., last_part_s: _Optional[float] = ..., num_parts: _Optional[int] = ..., num_held_blocks: _Optional[int] = ...) -> None: ...

class DecodeTimes(_message.Message):
    __slots__ = ("num_steps", "decode_s", "longest")
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    LONGEST_FIELD_NUMBER: _ClassVar[int]
    num_steps: int
    decode_s: float
    longest: _containers.RepeatedCompositeFieldContainer[Gap]
    def __init__(self, num_steps: _Optional[int] = ..., decode_s: _Optional[float] = ..., longest: _Optional[_Iterable[_Union[Gap, _Mapping]]] = ...) -> None: ...

class Gap(_message.Message):
    __slots__ = ("step", "gap_s")
    STEP_FIELD_NUMBER: _ClassVar[int]
    GAP_S_FIELD_NUMBER: _ClassVar[int]
    step: int
    gap_s: float
    def __init__(self, step: _Optional[int] = ..., gap_s: _Optional[float] = ...) -> None: ...

class Stayed(_message.Message):
    __slots__ = ("move", "error")
    MOVE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    move: int
    error: _common_pb2.Error
    def __init__(self, move: _Optional[int] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...

class Adopted(_message.Message):
    __slots__ = ("transfer_s", "num_cached_tokens", "transfer_bytes", "commit_s", "scatter_s", "step_wait_s")
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMMIT_S_FIELD_NUMBER: _ClassVar[int]
    SCATTER_S_FIELD_NUMBER: _ClassVar[int]
    STEP_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    transfer_s: float
    num_cached_tokens: int
    transfer_bytes: int
    commit_s: float
    scatter_s: float
    step_wait_s: float
    def __init__(self, transfer_s: _Optional[float] = ..., num_cached_tokens: _Optional[int] = ..., transfer_bytes: _Optional[int] = ..., commit_s: _Optional[float] = ..., scatter_s: _Optional[float] = ..., step_wait_s: _Optional[float] = ...) -> None: ...

class End(_message.Message):
    __slots__ = ("error", "prompt", "decode")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    error: _common_pb2.Error
    prompt: PromptTimes
    decode: DecodeTimes
    def __init__(self, error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., prompt: _Optional[_Union[PromptTimes, _Mapping]] = ..., decode: _Optional[_Union[DecodeTimes, _Mapping]] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("num_waiting", "num_running", "num_blocks_free", "num_blocks_total", "draining", "num_waiting_tokens", "target_itl_s", "prompt_tokens_per_s")
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TARGET_ITL_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    num_waiting: int
    num_running: int
    num_blocks_free: int
    num_blocks_total: int
    draining: bool
    num_waiting_tokens: int
    target_itl_s: float
    prompt_tokens_per_s: float
    def __init__(self, num_waiting: _Optional[int] = ..., num_running: _Optional[int] = ..., num_blocks_free: _Optional[int] = ..., num_blocks_total: _Optional[int] = ..., draining: _Optional[bool] = ..., num_waiting_tokens: _Optional[int] = ..., target_itl_s: _Optional[float] = ..., prompt_tokens_per_s: _Optional[float] = ...) -> None: ...

class KvEvents(_message.Message):
    __slots__ = ("sequence", "snapshot", "removed", "stored")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    snapshot: bool
    removed: bytes
    stored: bytes
    def __init__(self, sequence: _Optional[int] = ..., snapshot: _Optional[bool] = ..., removed: _Optional[bytes] = ..., stored: _Optional[bytes] = ...) -> None: ...

class PrefillMessage(_message.Message):
    __slots__ = ("hello", "reserve", "commit", "release", "heartbeat", "auth")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    AUTH_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    reserve: Reserve
    commit: Commit
    release: Release
    heartbeat: Heartbeat
    auth: Auth
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., reserve: _Optional[_Union[Reserve, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., auth: _Optional[_Union[Auth, _Mapping]] = ...) -> None: ...

class DecodeMessage(_message.Message):
    __slots__ = ("hello", "grant", "credit", "refuse", "commit_reply", "heartbeat", "auth", "landed")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    REFUSE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_REPLY_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    AUTH_FIELD_NUMBER: _ClassVar[int]
    LANDED_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    grant: Grant
    credit: Credit
    refuse: Refuse
    commit_reply: CommitReply
    heartbeat: Heartbeat
    auth: Auth
    landed: Landed
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ..., refuse: _Optional[_Union[Refuse, _Mapping]] = ..., commit_reply: _Optional[_Union[CommitReply, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., auth: _Optional[_Union[Auth, _Mapping]] = ..., landed: _Optional[_Union[Landed, _Mapping]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "incarnation", "target_incarnation", "node_id", "layout", "endpoints", "error", "part_blocks")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TARGET_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PART_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    incarnation: str
    target_incarnation: str
    node_id: str
    layout: _common_pb2.KvLayout
    endpoints: _containers.RepeatedCompositeFieldContainer[_common_pb2.TransportEndpoint]
    error: _common_pb2.Error
    part_blocks: int
    def __init__(self, protocol_version: _Optional[int] = ..., incarnation: _Optional[str] = ..., target_incarnation: _Optional[str] = ..., node_id: _Optional[str] = ..., layout: _Optional[_Union[_common_pb2.KvLayout, _Mapping]] = ..., endpoints: _Optional[_Iterable[_Union[_common_pb2.TransportEndpoint, _Mapping]]] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., part_blocks: _Optional[int] = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("attempt_id", "target_incarnation", "num_tokens", "block_hashes", "num_samples", "deadline_s", "max_total_tokens", "grouped_from_block", "layer_groups", "priority", "move", "num_spare_tokens", "age_s", "goes_on")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GROUPED_FROM_BLOCK_FIELD_NUMBER: _ClassVar[int]
    LAYER_GROUPS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    NUM_SPARE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    GOES_ON_FIELD_NUMBER: _ClassVar[int]
    attempt_id: _common_pb2.AttemptId
    target_incarnation: str
    num_tokens: int
    block_hashes: bytes
    num_samples: int
    deadline_s: float
    max_total_tokens: int
    grouped_from_block: int
    layer_groups: int
    priority: int
    move: int
    num_spare_tokens: int
    age_s: float
    goes_on: bool
    def __init__(self, attempt_id: _Optional[_Union[_common_pb2.AttemptId, _Mapping]] = ..., target_incarnation: _Optional[str] = ..., num_tokens: _Optional[int] = ..., block_hashes: _Optional[bytes] = ..., num_samples: _Optional[int] = ..., deadline_s: _Optional[float] = ..., max_total_tokens: _Optional[int] = ..., grouped_from_block: _Optional[int] = ..., layer_groups: _Optional[int] = ..., priority: _Optional[int] = ..., move: _Optional[int] = ..., num_spare_tokens: _Optional[int] = ..., age_s: _Optional[float] = ..., goes_on: _Optional[bool] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("attempt_id", "lease", "num_held_blocks", "num_parts", "credits", "checksums", "num_held_in_groups")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PARTS_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_IN_GROUPS_FIELD_NUMBER: _ClassVar[int]
    attempt_id: _common_pb2.AttemptId
    lease: int
    num_held_blocks: int
    num_parts: int
    credits: int
    checksums: bool
    num_held_in_groups: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, attempt_id: _Optional[_Union[_common_pb2.AttemptId, _Mapping]] = ..., lease: _Optional[int] = ..., num_held_blocks: _Optional[int] = ..., num_parts: _Optional[int] = ..., credits: _Optional[int] = ..., checksums: _Optional[bool] = ..., num_held_in_groups: _Optional[_Iterable[int]] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("lease", "credits")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    lease: int
    credits: int
    def __init__(self, lease: _Optional[int] = ..., credits: _Optional[int] = ...) -> None: ...

class Refuse(_message.Message):
    __slots__ = ("attempt_id", "error")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    attempt_id: _common_pb2.AttemptId
    error: _common_pb2.Error
    def __init__(self, attempt_id: _Optional[_Union[_common_pb2.AttemptId, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("lease", "attempt_id", "target_incarnation", "prompt_tokens", "samples", "sampling", "deadline_s", "cache_salt", "age_s")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    lease: int
    attempt_id: _common_pb2.AttemptId
    target_incarnation: str
    prompt_tokens: bytes
    samples: _containers.RepeatedCompositeFieldContainer[_common_pb2.Sample]
    sampling: _common_pb2.SamplingParams
    deadline_s: float
    cache_salt: str
    age_s: float
    def __init__(self, lease: _Optional[int] = ..., attempt_id: _Optional[_Union[_common_pb2.AttemptId, _Mapping]] = ..., target_incarnation: _Optional[str] = ..., prompt_tokens: _Optional[bytes] = ..., samples: _Optional[_Iterable[_Union[_common_pb2.Sample, _Mapping]]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., deadline_s: _Optional[float] = ..., cache_salt: _Optional[str] = ..., age_s: _Optional[float] = ...) -> None: ...

class CommitReply(_message.Message):
    __slots__ = ("lease", "attempt_id", "error")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    lease: int
    attempt_id: _common_pb2.AttemptId
    error: _common_pb2.Error
    def __init__(self, lease: _Optional[int] = ..., attempt_id: _Optional[_Union[_common_pb2.AttemptId, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...

class Landed(_message.Message):
    __slots__ = ("lease", "attempt_id")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    lease: int
    attempt_id: _common_pb2.AttemptId
    def __init__(self, lease: _Optional[int] = ..., attempt_id: _Optional[_Union[_common_pb2.AttemptId, _Mapping]] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("attempt_id",)
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    attempt_id: _common_pb2.AttemptId
    def __init__(self, attempt_id: _Optional[_Union[_common_pb2.AttemptId, _Mapping]] = ...) -> None: ...
