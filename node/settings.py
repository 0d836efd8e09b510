"""Settings of a node, of either role. They have vLLM's names where vLLM has them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from baton.address import HostPort
from baton.node_info import NodeRole
from baton.settings import LONGEST_S, LargeNumber, ListenAddress, Sizes
from node.kv_events_config import KvEventsConfig
from node.parallel_settings import ParallelSettings

GIB = 1024**3
CPU_POOL_BYTES = GIB
"""Of the KV pool of a rank on a CPU at most, unless it is set."""
METRICS_PORT_OFFSET = 1000

_BATCHED_TOKENS = 2048
"""On a decode node, this bounds how long a prompt that it computes itself delays the next tokens of its requests."""
_GPU_LAYER_GROUPS = 4


class NodeSettings(ParallelSettings):
    """The settings that prefill and decode nodes have in common."""

    gpu_batched_tokens: ClassVar[int] = _BATCHED_TOKENS
    """The role's default of --max-num-batched-tokens on a GPU."""
    saturating_num_tokens: ClassVar[int | None] = None
    """See EngineConfig."""
    captured_prompt_tokens: ClassVar[int] = 512
    """The most tokens of a step of prompts alone with a CUDA graph."""
    captured_mixed_tokens: ClassVar[int] = 1024
    """The most tokens of prompts beside decodes in a step with a CUDA graph."""
    has_streams: ClassVar[bool] = True
    """Whether the role has steps with decodes, which --target-itl bounds. A cluster is started with that flag for all
    nodes."""
    num_outward_slots: ClassVar[int] = 0
    """Staging slots besides --kv-slots, for parts to nodes of the same role."""

    node_id: str | None = Field(None, description="name in logs; unset: role and port")

    listen: ListenAddress = Field(HostPort("127.0.0.1", 0), description="gRPC address; port 0 takes any free one")
    advertise: ListenAddress | None = Field(
        None,
        description="address that others reach this node at, port 0 standing for the port listened on; unset: --listen",
    )
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="port of /metrics and /health on the host of --listen, 0 takes any free one; "
        f"unset: the port of --listen + {METRICS_PORT_OFFSET}",
    )

    max_model_len: LargeNumber = Field(
        None,
        ge=2,
        description="tokens of prompt and answer together, 32K being 32768 and 32k 32000; unset: the checkpoint's",
    )
    max_num_seqs: int = Field(256, ge=1, le=1 << 20, description="sequences in one step")
    max_num_batched_tokens: LargeNumber = Field(
        None,
        ge=1,
        description="tokens of prompts in one step, beside one of each request that generates; longer prompts go in "
        "chunks; "
        "unset: 2048, and 8192 on a prefill node with a GPU, whose steps delay no stream",
    )
    target_itl: float | None = Field(
        None,
        gt=0,
        le=60_000,
        description="of a decode node: milliseconds that a step with decodes should take at most; prompts that it "
        "computes itself get chunks for which that is predicted; a good start is 2.5 times a step without prompts; "
        "unset: only --max-num-batched-tokens bounds chunks",
    )
    max_waiting: int = Field(4096, ge=1, description="requests that may queue; more are refused with 429")
    request_timeout: float = Field(
        3600.0, gt=0, le=LONGEST_S, description="seconds that a request may take at most, whatever its router allows"
    )

    step_timeout: float = Field(
        300.0,
        gt=0,
        description="seconds that a step may take; the node ends if one takes longer, its GPU must be hanging",
    )
    enforce_eager: bool = Field(False, description="never use CUDA graphs")
    cudagraph_capture_sizes: Sizes = Field(
        (), description="sequences per step to capture CUDA graphs for, smaller steps being padded; unset: a ladder"
    )
    async_scheduling: bool | None = Field(
        None,
        description="start a step before the tokens of the one before are read; unset: on with a GPU, and with several "
        "--pipeline-parallel-size stages",
    )

    block_size: int = Field(16, ge=1, le=1 << 16, description="tokens in one KV block; the same on all nodes")
    num_gpu_blocks_override: int | None = Field(
        None, ge=2, lt=1 << 31, description="KV blocks; unset: as many as the memory holds"
    )
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="share of a GPU's memory to use, 1 is all")
    kv_cache_memory_bytes: LargeNumber = Field(
        None,
        ge=1,
        description="bytes of each rank's KV pool, 4G being 4 GiB; unset: the share of the GPU that is left, on a CPU "
        "at most 1 GiB, and a quarter of the memory among a host's ranks",
    )

    structured_outputs_backend: Literal["guidance", "xgrammar"] = Field(
        "guidance",
        description="what compiles structured outputs, the same on all nodes: guidance; xgrammar (extra [xgrammar], "
        "which the router needs too)",
    )

    transport: Literal["ucx", "ipc", "nixl", "nccl"] = Field(
        "ucx",
        description="what carries KV blocks between nodes, the same on all: ucx; ipc (all on one host); "
        "nixl (extra [nixl]); nccl (GPUs)",
    )
    transfer_interface: str | None = Field(
        None,
        description="network interface for KV blocks, as in UCX_NET_DEVICES (eth0, mlx5_0:1); unset: the "
        "one that has the address of --listen, and RDMA devices",
    )
    kv_link_bandwidth: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="GB/s that the link between nodes carries, for which slots are sized; "
        "unset: 340 with a GPU, 2 on a CPU",
    )
    kv_slots: int | None = Field(
        None, ge=2, le=1 << 16, description="staging slots for KV parts; unset: as many as the link's bandwidth wants"
    )
    kv_slot_blocks: int | None = Field(
        None,
        ge=1,
        description="KV blocks in one slot; two nodes use the smaller number; unset: as many as the link's "
        "bandwidth wants",
    )
    kv_layer_groups: int | None = Field(
        None,
        ge=1,
        description="of a prefill node: groups of layers in which the KV of a prompt's last chunk travels while it is "
        "computed; 1: in one go; unset: 4 with GPUs of one host and one stage, else 1",
    )
    kv_events_config: str | None = Field(
        None,
        description="JSON in vLLM's form: publish over ZMQ which blocks the prefix cache gains and loses, as "
        '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}; needs the extra kv-events (docs/kv_events.md)',
    )
    verify_transfers: bool = Field(
        False,
        description="have checksums with KV blocks that travel, and fail those that came damaged; enough on one of two "
        "nodes",
    )

    admin_key_file: Path | None = Field(
        None,
        description="file with the key for /debug/kv, /debug/profile, /integrity and AuditKv, sent as "
        "'Authorization: Bearer KEY'; unset: they answer only to clients on the node's own machine",
    )
    profile_dir: Path | None = Field(
        None, description="folder for the traces of POST /debug/profile; unset: that is refused"
    )
    drain_timeout: float = Field(
        30.0, ge=0, le=LONGEST_S, description="seconds that running requests have left after SIGTERM, SIGINT or SIGHUP"
    )

    @model_validator(mode="after")
    def _check(self) -> NodeSettings:
        if self.listen.is_wildcard and self.advertise is None:
            raise ValueError(f"--advertise: required with --listen {self.listen}, which nobody can connect to")
        if self.listen.port and self.metrics_listen == self.listen:
            raise ValueError(f"--metrics-port: {self.listen.port} is the port of --listen")
        if self.advertise is not None and self.advertise.is_wildcard:
            raise ValueError(f"--advertise: nobody can connect to {self.advertise}")
        if self.kv_events_config is not None:
            KvEventsConfig.parse(self.kv_events_config)
        if self.nnodes > 1 and self.transport == "ipc":
            raise ValueError("--transport: ipc moves KV within one host, and --nnodes has more")
        if self.engine == "simulated" and "transport" in self.model_fields_set:
            raise ValueError("--transport: a simulated node has none, its KV has no bytes")
        if self.engine == "simulated" and self.profile_dir is not None:
            raise ValueError("--profile-dir: a simulated node computes nothing to profile")
        if self.engine == "simulated" and self.verify_transfers:
            raise ValueError("--verify-transfers: a simulated node's KV has no bytes to verify")
        return self

    @property
    def carried_by(self) -> str:
        """The name of the transport that carries KV blocks."""
        return "simulated" if self.engine == "simulated" else self.transport

    def name(self, role: NodeRole) -> str:
        """The node's name in logs."""
        return self.node_id or f"{role.value}-{self.listen.port or os.getpid()}"

    @property
    def captures_graphs(self) -> bool:
        """Whether CUDA graphs are captured on a GPU. Steps of a model in stages are launched op by op: only prefill
        nodes have stages, most of their chunks are too long for a graph, and a stage's graph would need hidden states
        at a fixed address."""
        return not self.enforce_eager and self.pipeline_parallel_size == 1

    def layer_groups(self, on_gpu: bool) -> int:
        """--kv-layer-groups, or the device's default: 1 on a CPU, where a turn sees a step's layers all at once; with
        several stages, which send all of their layers together; and with several hosts, whose ranks send what a step
        computed when it is done."""
        in_groups = on_gpu and self.pipeline_parallel_size == self.nnodes == 1
        return self.kv_layer_groups or (_GPU_LAYER_GROUPS if in_groups else 1)

    @property
    def target_itl_s(self) -> float | None:
        """See EngineConfig."""
        return self.target_itl / 1e3 if self.target_itl is not None and self.has_streams else None

    def batched_tokens(self, on_gpu: bool) -> int:
        """--max-num-batched-tokens, or the device's default."""
        return self.max_num_batched_tokens or (self.gpu_batched_tokens if on_gpu else _BATCHED_TOKENS)

    @property
    def metrics_listen(self) -> HostPort:
        """Port 0 if --listen has port 0 or the default port would be above 65535."""
        port = self.metrics_port
        if port is None:
            port = self.listen.port + METRICS_PORT_OFFSET if self.listen.port else 0
        return HostPort(self.listen.host, port if port <= 65535 else 0)

    def advertised(self, port: int) -> HostPort:
        """The address at which others reach this node when it listens on `port`."""
        chosen = self.advertise or self.listen
        return HostPort(chosen.host, chosen.port or port) if self.advertise else HostPort(chosen.host, port)
