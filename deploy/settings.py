"""Settings of `baton-up`: its own, and those that it passes on to nodes and router under the same names."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, create_model
from pydantic.fields import FieldInfo

from baton.address import HostPort
from baton.settings import LONGEST_S, ListenAddress, Settings, env_name, flag_name
from node.settings import NodeSettings
from router.settings import RouterSettings


class OwnSettings(Settings):
    """What `baton-up` decides itself, for each process or for all of them together."""

    model: str = Field(
        "baton-tiny",
        description="folder with a Hugging Face checkpoint, a hub id, or baton-tiny or baton-tiny-moe, "
        "which come with baton",
    )
    prefill: int = Field(1, ge=0, description="prefill nodes to start; 0: decode nodes compute their own prompts")
    decode: int = Field(1, ge=1, description="decode nodes to start")
    http: ListenAddress = Field(
        HostPort("127.0.0.1", 8000), description="address of the HTTP API, port 0 takes any free one"
    )
    grpc: ListenAddress = Field(
        HostPort("127.0.0.1", 8001), description="address of the gRPC API, port 0 takes any free one"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="where the nodes compute; auto: cuda where there is one"
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        le=64,
        description="ranks of each node, among which the model and its KV are divided; each has a GPU of its own "
        "where there are GPUs",
    )
    prefill_tensor_parallel_size: int | None = Field(
        None, ge=1, le=64, description="ranks of each prefill node; unset: --tensor-parallel-size"
    )
    decode_tensor_parallel_size: int | None = Field(
        None, ge=1, le=64, description="ranks of each decode node; unset: --tensor-parallel-size"
    )
    prefill_pipeline_parallel_size: int = Field(
        1,
        ge=1,
        le=64,
        description="stages of each prefill node, among which the model's layers are divided; each has the ranks of "
        "--prefill-tensor-parallel-size",
    )
    enable_expert_parallel: bool = Field(
        False,
        description="of a mixture of experts, give each rank some experts as a whole, instead of a part of each",
    )
    data_parallel_size: int = Field(
        1,
        ge=1,
        le=64,
        description="nodes, each with requests of its own, that divide the experts among them; so many are started "
        "for each node of --prefill and --decode",
    )
    prefill_data_parallel_size: int | None = Field(
        None, ge=1, le=64, description="--data-parallel-size of the prefill nodes, if it differs"
    )
    decode_data_parallel_size: int | None = Field(
        None, ge=1, le=64, description="--data-parallel-size of the decode nodes, if it differs"
    )
    enable_eplb: bool = Field(
        False, description="with --enable-expert-parallel, move experts between a node's ranks while it serves"
    )
    eplb_config: str | None = Field(
        None, description="JSON of --enable-eplb, as the nodes' flag of the same name takes it (docs/parallel.md)"
    )
    cpu_threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="threads that compute on a CPU, of each rank of each node; unset: an equal share of the cores",
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="share of each GPU's memory to use, divided among the nodes on it, 1 is all"
    )
    drain_timeout: float = Field(
        30.0, ge=0, le=LONGEST_S, description="seconds that running requests have left after SIGTERM, SIGINT or SIGHUP"
    )
    ready_timeout: float = Field(600.0, gt=0, description="seconds until all must be ready to answer requests")

    def num_ranks(self, node: str) -> int:
        """Of the node of that name."""
        tensor, stages = self.parallel_sizes(node)
        return tensor * stages

    def parallel_sizes(self, node: str) -> tuple[int, int]:
        """Of the node of that name: ranks of each stage, and stages."""
        is_prefill = node.startswith("prefill")
        own = self.prefill_tensor_parallel_size if is_prefill else self.decode_tensor_parallel_size
        return own or self.tensor_parallel_size, self.prefill_pipeline_parallel_size if is_prefill else 1

    def num_peers(self, role: str) -> int:
        """Data parallel nodes that share experts, for nodes of the role, or of such a name."""
        is_prefill = role.startswith("prefill")
        own = self.prefill_data_parallel_size if is_prefill else self.decode_data_parallel_size
        return own or self.data_parallel_size

    def node_flags(self) -> list[str]:
        """Flags for every node: the model, and the settings given here by flag, environment or file."""
        return [f"--model={self.model}", *_flags(self, _HANDED_ON_TO_NODES)]

    def router_flags(self) -> list[str]:
        """Flags for the router, likewise."""
        return list(_flags(self, _HANDED_ON_TO_ROUTER))

    def router_env(self) -> dict[str, str]:
        """Secrets for the router, which go into its environment because every user can read command lines."""
        keys = {name: [key.get_secret_value() for key in getattr(self, name, ())] for name in _SECRETS}
        return {env_name(name): " ".join(found) for name, found in keys.items() if found}


_PER_PROCESS = {"listen", "advertise", "metrics_port", "node_id", "data_parallel_rank"}
_OF_ONE_ROLE = {"pipeline_parallel_size"}
"""Here there is a flag of its own for the nodes that take it."""


_BETWEEN_MACHINES = {
    *("nnodes", "node_rank", "master_addr", "master_port"),
    *("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs"),
    *("data_parallel_address", "data_parallel_rpc_port", "distributed_timeout_seconds"),
}
"""A cluster on one machine serves without TLS, also to `baton-up` itself, and its nodes meet at free ports."""


def _handed_on(settings: type[Settings]) -> dict[str, FieldInfo]:
    skipped = {"config", *_PER_PROCESS, *_OF_ONE_ROLE, *_BETWEEN_MACHINES} | OwnSettings.model_fields.keys()
    return {name: field for name, field in settings.model_fields.items() if name not in skipped}


_SECRETS = ("api_key", "admin_api_key")
_SHARED = ("log_level", "log_format", "drain_timeout")
_OF_EACH_NODE = "kv_events_config"
"""Handed on by `deploy.plan`, to each node with its own ports."""
_HANDED_ON_TO_NODES = ("device", *(name for name in _handed_on(NodeSettings) if name != _OF_EACH_NODE), *_SHARED)
_HANDED_ON_TO_ROUTER = (*(name for name in _handed_on(RouterSettings) if name not in _SECRETS), *_SHARED)

_FIELDS: Any = {
    name: (field.annotation, field) for name, field in (_handed_on(NodeSettings) | _handed_on(RouterSettings)).items()
}


class _Command(OwnSettings):
    """Start a cluster on this machine: a router, and prefill and decode nodes. Serves until Ctrl-C; a second one kills.

    What is not listed as baton-up's own goes to the nodes or the router as it is.
    """

    prog: ClassVar[str] = "baton-up"


UpSettings = create_model("UpSettings", __base__=_Command, __doc__=_Command.__doc__, **_FIELDS)


def _flags(settings: Settings, names: tuple[str, ...]) -> Iterator[str]:
    values: Mapping[str, Any] = {name: getattr(settings, name) for name in names if name in settings.model_fields_set}
    for name, value in values.items():
        if isinstance(value, bool):
            yield flag_name(name) if value else flag_name(f"no_{name}")
        elif isinstance(value, tuple):
            yield f"{flag_name(name)}={','.join(map(str, value))}"
        elif isinstance(value, dict):
            yield f"{flag_name(name)}={json.dumps(value)}"
        elif value is not None:
            yield f"{flag_name(name)}={value}"
