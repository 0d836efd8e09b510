"""Settings of a node, of either role. They have vLLM's names where vLLM has them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from baton.address import HostPort
from baton.node_info import NodeRole
from baton.settings import ListenAddress, Sizes
from baton.trust import ClusterSettings
from node.eplb_config import EplbConfig

GIB = 1024**3
METRICS_PORT_OFFSET = 1000

_BATCHED_TOKENS = 2048
"""On a decode node, this bounds how long a prompt that it computes itself delays the next tokens of its requests."""


_GPU_LAYER_GROUPS = 4


class NodeSettings(ClusterSettings):
    """What a prefill node and a decode node take alike."""

    gpu_batched_tokens: ClassVar[int] = _BATCHED_TOKENS
    """The role's default of --max-num-batched-tokens on a GPU."""
    saturating_num_tokens: ClassVar[int | None] = None
    """See EngineConfig."""
    captured_prompt_tokens: ClassVar[int] = 512
    """The most tokens of a step of prompts alone with a CUDA graph."""
    captured_mixed_tokens: ClassVar[int] = 1024
    """The most tokens of prompts beside decodes in a step with a CUDA graph."""
    has_streams: ClassVar[bool] = True
    """Whether it has steps with decodes, which --target-itl bounds; a cluster is started with it for all nodes."""
    num_outward_slots: ClassVar[int] = 0
    """Staging slots besides --kv-slots, for parts to nodes of the same role."""

    model: str = Field(
        description="folder with a Hugging Face checkpoint, a hub id, or baton-tiny or baton-tiny-moe, "
        "which come with baton"
    )
    revision: str | None = Field(None, description="branch, tag or commit of a hub id")
    served_model_name: str | None = Field(None, description="model name that clients use; unset: as in --model")
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

    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="where to compute; auto: cuda where there is one"
    )
    dtype: Literal["auto", "half", "float16", "bfloat16", "float", "float32"] = Field(
        "auto",
        description="of weights and KV cache; auto: float32 on a CPU, else the checkpoint's; a CPU has no float16, and "
        "is fast in bfloat16 if it has AVX512-BF16 or AMX",
    )
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = Field(
        "auto",
        description="of the KV cache; auto: that of --dtype; fp8: 8 bits, with a scale for each token and head, which "
        "halves what is stored and sent",
    )
    disable_hybrid_kv_cache_manager: bool = Field(
        False,
        description="keep and send the KV of all tokens in all layers, also of layers with a sliding window, which do "
        "not read it any more; the same on all nodes of a model",
    )
    quantization: Literal["awq", "compressed-tensors", "fp8", "gptq", "int8", "mxfp4"] | None = Field(
        None,
        description="fp8, int8: quantize a 16-bit checkpoint's linear layers while it loads, with a scale per row; "
        "unset, or the checkpoint's own method: as config.json says",
    )
    engine: Literal["torch", "simulated"] = Field(
        "torch",
        description="what computes: torch; simulated: nothing, steps and transfers only take the time that --profile "
        "says, tokens are made up, and torch is not needed",
    )
    profile: str | None = Field(
        None, description="with --engine simulated: file with the times of a real node, or h200-8b (comes with baton)"
    )
    time_scale: float = Field(
        1.0,
        gt=0,
        allow_inf_nan=False,
        description="with --engine simulated: by how much steps and transfers are faster than in the profile",
    )
    load_format: Literal["auto", "safetensors", "dummy"] = Field(
        "auto",
        description="how weights are loaded: safetensors: straight from the files or not at all; auto: through "
        "transformers where their names are not the model's own; dummy: random ones, for benchmarks",
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        le=64,
        description="ranks among which the model and its KV are divided, each a process of its own, with a GPU of its "
        "own where there are GPUs; nodes with different numbers work together",
    )
    pipeline_parallel_size: int = Field(
        1,
        ge=1,
        le=64,
        description="stages among which the model's layers and their KV are divided, each of --tensor-parallel-size "
        "ranks; prefill nodes only",
    )
    nnodes: int = Field(
        1,
        ge=1,
        le=64,
        description="hosts among which this node's ranks are divided evenly; all are started with the same flags, "
        "and a --node-rank each",
    )
    node_rank: int = Field(
        0,
        ge=0,
        description="this host's number among them: 0 is the node, the others compute for it and have no address",
    )
    master_addr: str = Field("127.0.0.1", description="address of the host with --node-rank 0, as the others reach it")
    master_port: int = Field(
        29501, ge=1, le=65535, description="port on that host at which they meet; nothing is authenticated there"
    )
    enable_expert_parallel: bool = Field(
        False,
        description="of a mixture of experts, give each rank some experts as a whole, instead of a part of each",
    )
    data_parallel_size: int = Field(
        1,
        ge=1,
        le=64,
        description="nodes that divide the experts of a mixture among all their ranks, each with requests and KV of "
        "its own, and step together; needs --enable-expert-parallel",
    )
    data_parallel_rank: int | None = Field(None, ge=0, description="this node's number among them, from 0")
    data_parallel_address: str = Field("127.0.0.1", description="host of the one with rank 0, as the others reach it")
    data_parallel_rpc_port: int = Field(
        29550, ge=1, le=65535, description="port on that host at which they meet; nothing is authenticated there"
    )
    enable_eplb: bool = Field(
        False,
        description="with --enable-expert-parallel, move experts between ranks while serving, so that all are equally "
        "busy",
    )
    eplb_config: str | None = Field(
        None,
        description='JSON in vLLM\'s form: {"window_size": 1000, "step_interval": 3000, "num_redundant_experts": 0}, '
        "which are the defaults: how many steps count, how many are between two decisions, and how many slots for "
        "another copy of an expert all ranks have (docs/parallel.md)",
    )
    cpu_threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="threads that compute on a CPU, for each rank; unset: torch's choice, divided among the ranks",
    )
    seed: int = Field(0, description="of torch's generators; requests carry seeds of their own")

    max_model_len: int | None = Field(
        None, ge=2, description="tokens of prompt and answer together; unset: the checkpoint's"
    )
    max_num_seqs: int = Field(256, ge=1, description="sequences in one step")
    max_num_batched_tokens: int | None = Field(
        None,
        ge=1,
        description="tokens of prompts in one step, beside one of each request that generates; longer prompts go in "
        "chunks; "
        "unset: 2048, and 8192 on a prefill node with a GPU, which no one's next token waits for",
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
        3600.0, gt=0, description="seconds that a request may take at most, whatever its router allows"
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

    block_size: int = Field(16, ge=1, description="tokens in one KV block; the same on all nodes")
    num_gpu_blocks_override: int | None = Field(None, ge=2, description="KV blocks; unset: as many as the memory holds")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="share of a GPU's memory to use, 1 is all")
    kv_cache_memory_bytes: int | None = Field(
        None, ge=1, description="bytes of the KV pool; unset: the share of the GPU that is left, on a CPU at most 1 GiB"
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
        description="GB/s that the link between nodes carries, for which slots are sized; "
        "unset: 340 with a GPU, 2 on a CPU",
    )
    kv_slots: int | None = Field(
        None, ge=2, description="staging slots for KV parts; unset: as many as the link's bandwidth wants"
    )
    kv_slot_blocks: int | None = Field(
        None, ge=1, description="KV blocks in one slot; two nodes use the smaller number; unset: likewise"
    )
    kv_layer_groups: int | None = Field(
        None,
        ge=1,
        description="of a prefill node: groups of layers in which the KV of a prompt's last chunk travels while it is "
        "computed; 1: in one go; unset: 4 with a GPU and one rank, else 1",
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
        30.0, ge=0, description="seconds that running requests have left after SIGTERM, SIGINT or SIGHUP"
    )

    @model_validator(mode="after")
    def _check(self) -> NodeSettings:
        if self.listen.is_wildcard and self.advertise is None:
            raise ValueError(f"--advertise: required with --listen {self.listen}, which nobody can connect to")
        if self.listen.port and self.metrics_listen == self.listen:
            raise ValueError(f"--metrics-port: {self.listen.port} is the port of --listen")
        if (self.engine == "simulated") != (self.profile is not None):
            raise ValueError("--profile: goes with --engine simulated, which needs it")
        if self.engine == "torch" and self.time_scale != 1:
            raise ValueError("--time-scale: only goes with --engine simulated")
        if self.engine == "simulated" and "transport" in self.model_fields_set:
            raise ValueError("--transport: a simulated node has none, its KV has no bytes")
        if self.engine == "simulated" and self.profile_dir is not None:
            raise ValueError("--profile-dir: a simulated node computes nothing to profile")
        if self.engine == "simulated" and self.tensor_parallel_size > 1:
            raise ValueError("--tensor-parallel-size: a simulated node has one rank")
        if self.enable_expert_parallel and self.tensor_parallel_size * self.data_parallel_size == 1:
            raise ValueError("--enable-expert-parallel: divides experts among ranks, and --tensor-parallel-size is 1")
        self._check_data_parallel()
        self._check_hosts()
        self._check_eplb()
        if self.engine == "simulated" and self.pipeline_parallel_size > 1:
            raise ValueError("--pipeline-parallel-size: a simulated node has one rank")
        if self.engine == "simulated" and self.verify_transfers:
            raise ValueError("--verify-transfers: a simulated node's KV has no bytes to verify")
        if self.advertise is not None and self.advertise.is_wildcard:
            raise ValueError(f"--advertise: nobody can connect to {self.advertise}")
        return self

    def _check_data_parallel(self) -> None:
        if self.data_parallel_size == 1:
            if self.data_parallel_rank:
                raise ValueError(f"--data-parallel-rank: {self.data_parallel_rank} of a --data-parallel-size of 1")
            return
        if self.engine == "simulated":
            raise ValueError("--data-parallel-size: a simulated node is alone")
        if not self.enable_expert_parallel:
            raise ValueError(
                "--data-parallel-size: goes with --enable-expert-parallel; nodes of a model without experts need no "
                "flag to be data parallel, a router takes any number of them"
            )
        if self.data_parallel_rank is None or self.data_parallel_rank >= self.data_parallel_size:
            raise ValueError(f"--data-parallel-rank: each of the {self.data_parallel_size} nodes needs one, from 0")
        if self.pipeline_parallel_size > 1:
            raise ValueError("--pipeline-parallel-size: not with --data-parallel-size so far")

    def _check_hosts(self) -> None:
        if self.node_rank >= self.nnodes:
            raise ValueError(f"--node-rank: {self.node_rank} of --nnodes {self.nnodes}")
        if self.nnodes == 1:
            return
        if self.engine == "simulated":
            raise ValueError("--nnodes: a simulated node has one rank")
        if self.data_parallel_size > 1:
            raise ValueError("--nnodes: not with --data-parallel-size so far")
        each, left = divmod(self.num_ranks, self.nnodes)
        if left:
            raise ValueError(f"--nnodes: {self.num_ranks} ranks cannot be divided evenly among {self.nnodes} hosts")
        if each % self.tensor_parallel_size and self.tensor_parallel_size % each:
            stage = f"stages of {self.tensor_parallel_size} ranks"
            raise ValueError(f"--nnodes: {stage} do not fit hosts of {each}: one must be divisible by the other")
        if self.transport == "ipc":
            raise ValueError("--transport: ipc moves KV within one host, and --nnodes has more")
        if HostPort(self.master_addr, self.master_port).is_wildcard:
            raise ValueError(f"--master-addr: nobody can connect to {self.master_addr}")

    def _check_eplb(self) -> None:
        if self.eplb_config is not None and not self.enable_eplb:
            raise ValueError("--eplb-config: only goes with --enable-eplb")
        if self.enable_eplb and not self.enable_expert_parallel:
            raise ValueError("--enable-eplb: moves whole experts, which needs --enable-expert-parallel")
        if self.enable_eplb and self.pipeline_parallel_size > 1:
            raise ValueError("--enable-eplb: rank 0 must have all layers, and not those of one stage alone")
        if self.enable_eplb and self.load_format == "dummy":
            raise ValueError("--enable-eplb: copies of an expert must be equal, which --load-format dummy does not do")
        EplbConfig.parse(self.eplb_config or "{}")

    @property
    def eplb(self) -> EplbConfig | None:
        """None without --enable-eplb."""
        return EplbConfig.parse(self.eplb_config or "{}") if self.enable_eplb else None

    @property
    def num_ranks(self) -> int:
        """Of this node."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def host_ranks(self) -> range:
        """Those of this host."""
        each = self.num_ranks // self.nnodes
        return range(self.node_rank * each, (self.node_rank + 1) * each)

    @property
    def carried_by(self) -> str:
        """The name of the transport that carries KV blocks."""
        return "simulated" if self.engine == "simulated" else self.transport

    def name(self, role: NodeRole) -> str:
        """The node's name in logs."""
        return self.node_id or f"{role.value}-{self.listen.port or os.getpid()}"

    @property
    def captures_graphs(self) -> bool:
        """On a GPU. Steps of a model in stages are launched op by op: they are those of a prefill node, whose chunks
        are mostly too long for a graph, and a stage's graph would need hidden states at an address of its own. So are
        those of data parallel nodes, which gather as many rows as there are."""
        return not self.enforce_eager and self.pipeline_parallel_size == self.data_parallel_size == 1

    def layer_groups(self, on_gpu: bool) -> int:
        """--kv-layer-groups, or the device's default: 1 on a CPU, where a turn sees a step's layers all at once, and
        with several ranks, of which rank 0 knows only at a step's end what they have computed."""
        return self.kv_layer_groups or (_GPU_LAYER_GROUPS if on_gpu and self.num_ranks == 1 else 1)

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
