from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ErrorCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_CODE_UNSPECIFIED: _ClassVar[ErrorCode]
    ERROR_CODE_INVALID_REQUEST: _ClassVar[ErrorCode]
    ERROR_CODE_OVERLOADED: _ClassVar[ErrorCode]
    ERROR_CODE_CANCELLED: _ClassVar[ErrorCode]
    ERROR_CODE_DEADLINE_EXCEEDED: _ClassVar[ErrorCode]
    ERROR_CODE_NODE_UNAVAILABLE: _ClassVar[ErrorCode]
    ERROR_CODE_TRANSFER: _ClassVar[ErrorCode]
    ERROR_CODE_LAYOUT_MISMATCH: _ClassVar[ErrorCode]
    ERROR_CODE_TRANSFER_TIMEOUT: _ClassVar[ErrorCode]
    ERROR_CODE_PEER_LOST: _ClassVar[ErrorCode]
    ERROR_CODE_CACHE_EXHAUSTED: _ClassVar[ErrorCode]
    ERROR_CODE_INTERNAL: _ClassVar[ErrorCode]

class NodeRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NODE_ROLE_UNSPECIFIED: _ClassVar[NodeRole]
    NODE_ROLE_PREFILL: _ClassVar[NodeRole]
    NODE_ROLE_DECODE: _ClassVar[NodeRole]
ERROR_CODE_UNSPECIFIED: ErrorCode
ERROR_CODE_INVALID_REQUEST: ErrorCode
ERROR_CODE_OVERLOADED: ErrorCode
ERROR_CODE_CANCELLED: ErrorCode
ERROR_CODE_DEADLINE_EXCEEDED: ErrorCode
ERROR_CODE_NODE_UNAVAILABLE: ErrorCode
ERROR_CODE_TRANSFER: ErrorCode
ERROR_CODE_LAYOUT_MISMATCH: ErrorCode
ERROR_CODE_TRANSFER_TIMEOUT: ErrorCode
ERROR_CODE_PEER_LOST: ErrorCode
ERROR_CODE_CACHE_EXHAUSTED: ErrorCode
ERROR_CODE_INTERNAL: ErrorCode
NODE_ROLE_UNSPECIFIED: NodeRole
NODE_ROLE_PREFILL: NodeRole
NODE_ROLE_DECODE: NodeRole

class AttemptId(_message.Message):
    __slots__ = ("router_epoch", "request_id", "attempt")
    ROUTER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    router_epoch: int
    request_id: str
    attempt: int
    def __init__(self, router_epoch: _Optional[int] = ..., request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "max_tokens", "min_tokens", "ignore_eos", "stop_token_ids", "num_logprobs", "structured_outputs", "allowed_token_ids", "bad_words_token_ids", "num_prompt_logprobs", "logits_processors", "beam_width", "length_penalty", "logprob_token_ids")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGITS_PROCESSORS_FIELD_NUMBER: _ClassVar[int]
    BEAM_WIDTH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    seed: int
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_logprobs: int
    structured_outputs: StructuredOutput
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words_token_ids: _containers.RepeatedScalarFieldContainer[bytes]
    num_prompt_logprobs: int
    logits_processors: _containers.RepeatedCompositeFieldContainer[LogitsProcessor]
    beam_width: int
    length_penalty: float
    logprob_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., num_logprobs: _Optional[int] = ..., structured_outputs: _Optional[_Union[StructuredOutput, _Mapping]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words_token_ids: _Optional[_Iterable[bytes]] = ..., num_prompt_logprobs: _Optional[int] = ..., logits_processors: _Optional[_Iterable[_Union[LogitsProcessor, _Mapping]]] = ..., beam_width: _Optional[int] = ..., length_penalty: _Optional[float] = ..., logprob_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class LogitsProcessor(_message.Message):
    __slots__ = ("name", "arguments")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    arguments: str
    def __init__(self, name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class StructuredOutput(_message.Message):
    __slots__ = ("kind", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: str
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("index", "output_tokens")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    index: int
    output_tokens: bytes
    def __init__(self, index: _Optional[int] = ..., output_tokens: _Optional[bytes] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: ErrorCode
    message: str
    def __init__(self, code: _Optional[_Union[ErrorCode, str]] = ..., message: _Optional[str] = ...) -> None: ...

class LayerKv(_message.Message):
    __slots__ = ("num_kv_heads", "head_dim_k", "head_dim_v", "dtype", "sliding_window", "state_bytes", "scale_dtype")
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_K_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_V_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SLIDING_WINDOW_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SCALE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    dtype: str
    sliding_window: int
    state_bytes: int
    scale_dtype: str
    def __init__(self, num_kv_heads: _Optional[int] = ..., head_dim_k: _Optional[int] = ..., head_dim_v: _Optional[int] = ..., dtype: _Optional[str] = ..., sliding_window: _Optional[int] = ..., state_bytes: _Optional[int] = ..., scale_dtype: _Optional[str] = ...) -> None: ...

class KvSlice(_message.Message):
    __slots__ = ("layer_start", "layer_end", "head_start", "head_end")
    LAYER_START_FIELD_NUMBER: _ClassVar[int]
    LAYER_END_FIELD_NUMBER: _ClassVar[int]
    HEAD_START_FIELD_NUMBER: _ClassVar[int]
    HEAD_END_FIELD_NUMBER: _ClassVar[int]
    layer_start: int
    layer_end: int
    head_start: int
    head_end: int
    def __init__(self, layer_start: _Optional[int] = ..., layer_end: _Optional[int] = ..., head_start: _Optional[int] = ..., head_end: _Optional[int] = ...) -> None: ...

class KvGroup(_message.Message):
    __slots__ = ("layers",)
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, layers: _Optional[_Iterable[int]] = ...) -> None: ...

class KvLayout(_message.Message):
    __slots__ = ("block_size", "fingerprint", "layers", "ranks", "groups")
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    block_size: int
    fingerprint: str
    layers: _containers.RepeatedCompositeFieldContainer[LayerKv]
    ranks: _containers.RepeatedCompositeFieldContainer[KvSlice]
    groups: _containers.RepeatedCompositeFieldContainer[KvGroup]
    def __init__(self, block_size: _Optional[int] = ..., fingerprint: _Optional[str] = ..., layers: _Optional[_Iterable[_Union[LayerKv, _Mapping]]] = ..., ranks: _Optional[_Iterable[_Union[KvSlice, _Mapping]]] = ..., groups: _Optional[_Iterable[_Union[KvGroup, _Mapping]]] = ...) -> None: ...

class TransportEndpoint(_message.Message):
    __slots__ = ("rank", "transport", "address")
    RANK_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    transport: str
    address: bytes
    def __init__(self, rank: _Optional[int] = ..., transport: _Optional[str] = ..., address: _Optional[bytes] = ...) -> None: ...

class GenerationDefaults(_message.Message):
    __slots__ = ("eos_token_ids", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    max_new_tokens: int
    def __init__(self, eos_token_ids: _Optional[_Iterable[int]] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., max_new_tokens: _Optional[int] = ...) -> None: ...

class NodeInfo(_message.Message):
    __slots__ = ("protocol_version", "role", "incarnation", "node_id", "address", "served_model_name", "max_model_len", "max_num_seqs", "num_blocks", "layout", "endpoints", "tokenizer_digest", "chat_template", "special_tokens", "generation_defaults", "vocab_size", "version", "structured_outputs_backend", "model_aliases", "max_logprobs", "metrics_address")
    class SpecialTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SERVED_MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUTS_BACKEND_FIELD_NUMBER: _ClassVar[int]
    MODEL_ALIASES_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    role: NodeRole
    incarnation: str
    node_id: str
    address: str
    served_model_name: str
    max_model_len: int
    max_num_seqs: int
    num_blocks: int
    layout: KvLayout
    endpoints: _containers.RepeatedCompositeFieldContainer[TransportEndpoint]
    tokenizer_digest: str
    chat_template: str
    special_tokens: _containers.ScalarMap[str, str]
    generation_defaults: GenerationDefaults
    vocab_size: int
    version: str
    structured_outputs_backend: str
    model_aliases: _containers.RepeatedScalarFieldContainer[str]
    max_logprobs: int
    metrics_address: str
    def __init__(self, protocol_version: _Optional[int] = ..., role: _Optional[_Union[NodeRole, str]] = ..., incarnation: _Optional[str] = ..., node_id: _Optional[str] = ..., address: _Optional[str] = ..., served_model_name: _Optional[str] = ..., max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., num_blocks: _Optional[int] = ..., layout: _Optional[_Union[KvLayout, _Mapping]] = ..., endpoints: _Optional[_Iterable[_Union[TransportEndpoint, _Mapping]]] = ..., tokenizer_digest: _Optional[str] = ..., chat_template: _Optional[str] = ..., special_tokens: _Optional[_Mapping[str, str]] = ..., generation_defaults: _Optional[_Union[GenerationDefaults, _Mapping]] = ..., vocab_size: _Optional[int] = ..., version: _Optional[str] = ..., structured_outputs_backend: _Optional[str] = ..., model_aliases: _Optional[_Iterable[str]] = ..., max_logprobs: _Optional[int] = ..., metrics_address: _Optional[str] = ...) -> None: ...
