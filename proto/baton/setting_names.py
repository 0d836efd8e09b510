"""The names of all commands' settings. Commands share an environment, and may share a file, so each must tell another
command's name from a misspelt one; but no command may import another's settings.

A test compares this list with the actual settings.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

ALL_NAMES = frozenset(
    {
        "admin_api_key",
        "admin_api_key_file",
        "admin_key_file",
        "advertise",
        "allow_credentials",
        "allowed_headers",
        "allowed_methods",
        "allowed_origins",
        "api_key",
        "api_key_file",
        "async_scheduling",
        "block_size",
        "body_timeout",
        "cache_salt_per_key",
        "cluster_secret_file",
        "cluster_ssl_ca_certs",
        "cluster_ssl_certfile",
        "cluster_ssl_keyfile",
        "config",
        "cpu_threads",
        "cudagraph_capture_sizes",
        "decode",
        "decode_dns",
        "device",
        "dns_interval",
        "drain_timeout",
        "dtype",
        "enable_auto_tool_choice",
        "enable_tokenizer_info_endpoint",
        "enforce_eager",
        "engine",
        "first_token",
        "gpu_memory_utilization",
        "grpc",
        "header_timeout",
        "http",
        "idle_timeout",
        "keep_alive_interval",
        "kv_cache_memory_bytes",
        "kv_layer_groups",
        "kv_link_bandwidth",
        "kv_slot_blocks",
        "kv_slots",
        "listen",
        "load_format",
        "log_format",
        "log_level",
        "max_body_bytes",
        "max_buffered_body_bytes",
        "max_connections",
        "max_header_bytes",
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_prompt_tokens",
        "max_num_requests",
        "max_num_samples",
        "max_num_seqs",
        "max_stored_response_bytes",
        "max_stored_responses",
        "max_timeline_bytes",
        "max_waiting",
        "max_waiting_tokens",
        "metrics_port",
        "migrate_above",
        "model",
        "node_id",
        "nodes_file",
        "num_gpu_blocks_override",
        "otlp_traces_endpoint",
        "policy",
        "prefill",
        "prefill_dns",
        "profile",
        "protect_metrics",
        "ready_timeout",
        "reasoning_parser",
        "request_timeout",
        "revision",
        "seed",
        "served_model_name",
        "silence_timeout",
        "ssl_ca_certs",
        "ssl_cert_reqs",
        "ssl_certfile",
        "ssl_keyfile",
        "step_timeout",
        "structured_outputs_backend",
        "target_itl",
        "time_scale",
        "timings",
        "tool_call_parser",
        "transfer_interface",
        "transport",
        "trust_request_chat_template",
        "verify_transfers",
        "websocket_idle_timeout",
        "workers",
        "write_timeout",
    }
)


def closest(name: str, known: Iterable[str]) -> str | None:
    """The most similar known name, or None."""
    return next(iter(difflib.get_close_matches(name, sorted(known), n=1)), None)


def of_kubernetes(variables: Iterable[str]) -> set[str]:
    """The variables that Kubernetes sets in containers for its Services: X_SERVICE_HOST, X_SERVICE_PORT, X_PORT, ..."""
    variables = [*variables]
    suffix = "_SERVICE_HOST"
    services = [variable.removesuffix(suffix) for variable in variables if variable.endswith(suffix)]
    heads = tuple(f"{service}_{kind}" for service in services for kind in ("SERVICE_", "PORT"))
    return {variable for variable in variables if variable.startswith(heads)}
