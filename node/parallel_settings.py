"""Settings of a node that divide its model: among ranks, stages and hosts, and its experts among several nodes."""

from __future__ import annotations

from pydantic import Field, model_validator

from baton.address import HostPort
from baton.settings import LONGEST_S
from node.eplb_config import EplbConfig
from node.model_settings import ModelSettings


class ParallelSettings(ModelSettings):
    """Among how many processes a node's model is divided, and how these find each other. See docs/parallel.md."""

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
        description="this host's number among the --nnodes: 0 is the node, the others compute for it and have no "
        "address",
    )
    master_addr: str = Field("127.0.0.1", description="address of the host with --node-rank 0, as the others reach it")
    master_port: int = Field(
        29501,
        ge=1,
        le=65535,
        description="port of --master-addr at which the hosts of a node meet; nothing is authenticated there",
    )
    distributed_timeout_seconds: float = Field(
        300.0,
        gt=0,
        le=LONGEST_S,
        description="for how long the hosts of a node, or data parallel nodes, wait for each other at a start",
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
    data_parallel_rank: int | None = Field(
        None, ge=0, description="this node's number among the data parallel nodes, from 0"
    )
    data_parallel_address: str = Field(
        "127.0.0.1", description="host of the node with --data-parallel-rank 0, as the others reach it"
    )
    data_parallel_rpc_port: int = Field(
        29550,
        ge=1,
        le=65535,
        description="port of --data-parallel-address at which data parallel nodes meet; nothing is authenticated there",
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
        description="threads that compute on a CPU, for each rank; unset: torch's choice, but no "
        "more than the container's CPU quota, divided among the ranks",
    )

    @model_validator(mode="after")
    def _check_parallel(self) -> ParallelSettings:
        if self.engine == "simulated" and self.tensor_parallel_size > 1:
            raise ValueError("--tensor-parallel-size: a simulated node has one rank")
        if self.engine == "simulated" and self.pipeline_parallel_size > 1:
            raise ValueError("--pipeline-parallel-size: a simulated node has one rank")
        if self.enable_expert_parallel and self.tensor_parallel_size * self.data_parallel_size == 1:
            raise ValueError("--enable-expert-parallel: divides experts among ranks, and --tensor-parallel-size is 1")
        self._check_data_parallel()
        self._check_hosts()
        self._check_eplb()
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
        if HostPort(self.data_parallel_address, self.data_parallel_rpc_port).is_wildcard:
            raise ValueError(f"--data-parallel-address: nobody can connect to {self.data_parallel_address}")
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
