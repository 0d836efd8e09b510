"""Flags of `vllm serve` that have another name here, or none, with what to say to somebody who gives one.

Flags that are the same are settings of baton's and not here.
"""

from __future__ import annotations

_ADDRESS = "the router has --http HOST:PORT, nodes have --listen HOST:PORT"
_LOGS = "--log-level says what is logged"
_BACKEND = "nodes have --structured-outputs-backend"
_NO_OFFLOADING = "nothing is offloaded to the CPU's memory"

VLLM_FLAGS = {
    "host": _ADDRESS,
    "port": _ADDRESS,
    "enable_prefix_caching": "prefix caching is always on",
    "enable_chunked_prefill": "chunked prefill is always on",
    "scheduling_policy": "the priorities of requests always count",
    "enable_prompt_tokens_details": "answers always have them, unless the router has --no-timings",
    "kv_transfer_config": "prefill and decode nodes meet through the router; --transport says how KV travels",
    "guided_decoding_backend": _BACKEND,
    "structured_outputs_config": _BACKEND,
    "compilation_config": "nodes have --cudagraph-capture-sizes and --enforce-eager",
    "api_server_count": "the router has --workers",
    "enable_request_id_headers": "answers always have them",
    "enable_server_load_tracking": "/load always answers",
    "tool_parser_plugin": "packages bring parsers as entry points (docs/tools.md)",
    "disable_uvicorn_access_log": _LOGS,
    "tokenizer": "the checkpoint's is used",
    "trust_remote_code": "Python code in checkpoints is never run",
    "enable_ssl_refresh": "certificates are always read again when their files change",
    "hf_token": "the token of the hub is in the variable HF_TOKEN",
    "download_dir": "models are downloaded to where the variable HF_HOME says",
    "uvicorn_log_level": _LOGS,
    "enable_log_requests": _LOGS,
    "disable_log_requests": _LOGS,
    "swap_space": _NO_OFFLOADING,
    "cpu_offload_gb": _NO_OFFLOADING,
    "enable_lora": "there are no LoRA adapters",
    "speculative_config": "there is no speculative decoding",
}
