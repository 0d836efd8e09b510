"""Settings of `baton-router`."""

from __future__ import annotations

from typing import ClassVar
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from baton.address import HostPort
from baton.rpc.trust import ClusterSettings
from baton.settings import LONGEST_S, ConnectAddresses, JsonObject, ListenAddress
from router.discovery_settings import DiscoverySettings
from router.edge_settings import EdgeSettings
from router.requests.request_state import FirstToken


class RouterSettings(EdgeSettings, DiscoverySettings, ClusterSettings):
    """Takes requests over HTTP and gRPC, and has them answered by prefill and decode nodes. Needs no model folder."""

    prog: ClassVar[str] = "baton-router"

    prefill: ConnectAddresses = Field(
        (), description="addresses of the prefill nodes; unset: decode nodes compute their own prompts"
    )
    decode: ConnectAddresses = Field((), description="addresses of the decode nodes")
    http: ListenAddress = Field(
        HostPort("127.0.0.1", 8000), description="address of the HTTP API, port 0 takes any free one"
    )
    grpc: ListenAddress = Field(
        HostPort("127.0.0.1", 8001), description="address of the gRPC API, port 0 takes any free one"
    )
    node_id: str | None = Field(None, description="name in logs; unset: router and the HTTP port")

    first_token: FirstToken = Field(
        "prefill",
        description="node that streams the first token: prefill, as soon as it is sampled, and the handoff is a gap "
        "behind it; decode, when that goes on with the request, and the handoff counts to the time to first token",
    )
    policy: str = Field(
        "cost",
        description="how nodes are chosen: cost, prefix, least-loaded, round-robin, random, or an installed one's name",
    )
    migrate_above: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="move running requests from a decode node to another one if the shares of their KV blocks that "
        "are in use, 0 to 1, differ by more than this; unset: only from nodes that drain",
    )
    tool_call_parser: str | None = Field(
        None, description="form in which the model writes tool calls: hermes, llama3_json, mistral, ...; unset: none"
    )
    enable_auto_tool_choice: bool = Field(
        False, description="let the model decide whether it calls tools; needs --tool-call-parser"
    )
    exclude_tools_when_tool_choice_none: bool = Field(
        False, description="do not show the tools to the model where a request's `tool_choice` is none"
    )
    reasoning_parser: str | None = Field(
        None, description="form in which the model writes its reasoning: qwen3, deepseek_r1, ...; unset: as content"
    )
    enable_force_include_usage: bool = Field(
        False, description="add the usage to each chunk of all streams of chats and completions"
    )
    default_chat_template_kwargs: JsonObject = Field(
        {},
        description="JSON object of variables that chat templates get unless requests say otherwise, as in "
        '{"enable_thinking": false}',
    )
    trust_request_chat_template: bool = Field(
        False, description="let requests bring a `chat_template` of their own, which is rendered in a sandbox"
    )
    enable_tokenizer_info_endpoint: bool = Field(
        False, description="serve /tokenizer_info: special tokens, added tokens and the chat template"
    )
    request_timeout: float = Field(
        600.0, gt=0, le=LONGEST_S, description="seconds that a request may take, from receipt to its end"
    )
    max_num_requests: int = Field(4096, ge=0, description="prompts in flight; more are refused with 429; 0 is no limit")
    max_num_prompt_tokens: int = Field(
        16 * 2**20, ge=0, description="tokens of all prompts in flight; more are refused with 429; 0 is no limit"
    )
    max_num_samples: int = Field(1024, ge=1, description="answers to one request, prompts times n; more are a 400")
    max_waiting: int = Field(
        1024,
        ge=0,
        description="requests that may wait, for each model, while there is no node to run them; more are refused with "
        "503",
    )
    max_waiting_tokens: int = Field(
        16 * 2**20,
        ge=0,
        description="tokens, of prompts and wanted answers, of requests that may wait, for each model, for room on "
        "decode nodes; more are refused with 429; 0 is no limit",
    )
    workers: int = Field(
        1,
        ge=1,
        le=64,
        description="processes that share both ports, each a router of its own, with limits of its own; with more than "
        "one, no responses are stored",
    )
    max_stored_responses: int = Field(
        4096, ge=0, description="answers of /v1/responses that this router keeps in memory; 0 keeps none"
    )
    max_stored_response_bytes: int = Field(
        256 * 2**20, ge=0, description="size of all kept responses with their conversations; the oldest go first"
    )
    otlp_traces_endpoint: str | None = Field(
        None,
        description="URL of an OpenTelemetry collector that gets a trace of each request over OTLP/HTTP, as in "
        "http://127.0.0.1:4318/v1/traces; unset: none",
    )
    max_timeline_bytes: int = Field(
        8 * 2**20,
        ge=0,
        description="size of the timelines of ended requests that /debug/requests shows, about 4 KB each; the oldest "
        "go first, 0 keeps none",
    )
    console: bool = Field(True, description="serve the live console, a web page, at /")
    keep_alive_interval: float = Field(
        5.0, gt=0, description="seconds between comments, or pings, on a stream that has nothing to say yet"
    )
    drain_timeout: float = Field(
        30.0, ge=0, le=LONGEST_S, description="seconds that running requests have left after SIGTERM, SIGINT or SIGHUP"
    )

    @property
    def num_stored_responses(self) -> int:
        """How many responses a process keeps."""
        return self.max_stored_responses if self.workers == 1 else 0

    @model_validator(mode="after")
    def _check(self) -> RouterSettings:
        if not self.decode and not self.finds_nodes:
            raise ValueError(
                "--decode: at least one address is needed, without --decode-dns, --nodes-file or --admin-api-key"
            )
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not (endpoint.startswith(("http://", "https://")) and urlsplit(endpoint).hostname):
            raise ValueError(f"--otlp-traces-endpoint: must be a URL with http:// or https://, not {endpoint}")
        every = [*self.prefill, *self.decode]
        twice = next((address for address in every if every.count(address) > 1), None)
        if twice:
            raise ValueError(f"--prefill, --decode: {twice} is given twice")
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ValueError("--enable-auto-tool-choice: needs --tool-call-parser")
        if self.workers > 1 and self.max_stored_responses and "max_stored_responses" in self.model_fields_set:
            raise ValueError(
                "--max-stored-responses: must be 0 with --workers, since the next request may come to another worker"
            )
        if self.workers > 1 and self.has_admin_keys:
            raise ValueError("--admin-api-key: must be unset with --workers, each of which has nodes of its own")
        if self.http == self.grpc and self.http.port:
            raise ValueError(f"--http, --grpc: both are {self.http}")
        return self
