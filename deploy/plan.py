"""Which processes make up a cluster on this machine: a pure function of settings, machine and ports.

On a CPU the nodes' ranks share the cores. GPUs are assigned round robin, one to each rank. A node sees the others
too, after its own, since UCX reaches a peer's memory only on a visible device, and makes the first one current.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, takewhile
from pathlib import Path

from baton.address import HostPort
from baton.process.resources import memory_bytes, num_cpus
from baton.settings import ENV_PREFIX, flag_name
from deploy.settings import OwnSettings
from node.kv_events_config import KvEventsConfig
from node.settings import CPU_POOL_BYTES

_GPU = re.compile(r"\d+|(GPU|MIG)-.+", re.ASCII)
"""In CUDA_VISIBLE_DEVICES. The first entry of another form, as -1 or Slurm's NoDevFiles, hides all from there on."""


@dataclass(frozen=True, slots=True)
class Child:
    """One process: a Python module with its arguments, and its additions to our environment."""

    name: str
    module: str
    arguments: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Machine:
    """`gpus`: as CUDA_VISIBLE_DEVICES names them. `memory_bytes`: what all processes may use; None: enough."""

    num_cores: int
    gpus: tuple[str, ...]
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class NodePorts:
    listen: HostPort
    metrics: HostPort
    peers: HostPort | None = None
    """Where the data parallel nodes meet of which this is rank 0."""


def this_machine() -> Machine:
    """What this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        gpus = [str(i) for i, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
    else:
        gpus = [*takewhile(_GPU.fullmatch, (gpu.strip() for gpu in visible.split(",")))]
    return Machine(num_cpus(), tuple(gpus), memory_bytes())


def node_names(settings: OwnSettings) -> list[str]:
    number = {"prefill": settings.prefill, "decode": settings.decode}
    return [f"{role}-{i}" for role, num in number.items() for i in range(num * settings.num_peers(role))]


def peers_of(settings: OwnSettings, name: str) -> tuple[str, int]:
    """The data parallel node with rank 0 among those of that name's, and that one's rank."""
    role, _, number = name.partition("-")
    rank = int(number) % settings.num_peers(role)
    return f"{role}-{int(number) - rank}", rank


def plan(
    settings: OwnSettings, machine: Machine, http: HostPort, grpc: HostPort, ports: Mapping[str, NodePorts]
) -> list[Child]:
    """The router, then the nodes, each named in `ports`."""
    threads = str(_threads(settings, machine, list(ports)))
    gpus = _gpus(settings, machine, list(ports))
    nodes = []
    for index, (name, held) in enumerate(ports.items()):
        own = [f"--node-id={name}", f"--listen={held.listen}", f"--metrics-port={held.metrics.port}"]
        own += _kv_events(settings, index)
        sizes = zip(_PARALLEL, settings.parallel_sizes(name), strict=True)
        own += [f"{flag_name(flag)}={size}" for flag, size in sizes if size > 1]
        if settings.enable_expert_parallel and settings.parallel_sizes(name)[0] * settings.num_peers(name) > 1:
            own.append("--enable-expert-parallel")
            own += _eplb(settings)
        own += _data_parallel(settings, name, ports)
        env = {"OMP_NUM_THREADS": threads, **gpus[name].env}
        arguments = (*settings.node_flags(), *own, f"--cpu-threads={threads}", *gpus[name].arguments)
        nodes.append(Child(name, f"{name.split('-')[0]}_node.main", arguments, env))
    return [_router(settings, http, grpc, ports), *nodes]


def placement(settings: OwnSettings, machine: Machine) -> str | None:
    """Where ranks compute, in a line; None where each node is one rank. Raises ValueError, by the flag's name, for
    ranks that this machine has no place for."""
    names = node_names(settings)
    ranks = {name: settings.num_ranks(name) for name in names}
    if settings.enable_expert_parallel and all(
        settings.parallel_sizes(name)[0] * settings.num_peers(name) == 1 for name in names
    ):
        raise ValueError("--enable-expert-parallel: divides experts among ranks, and no stage has more than one")
    if not settings.prefill:
        _check_no_prefill(settings)
    _check_eplb(settings)
    if not any(size > 1 for size in ranks.values()) and len(names) == settings.prefill + settings.decode:
        return None
    if settings.device != "cpu" and machine.gpus:
        return _placement_on_gpus(settings, machine, ranks)
    for name, size in ranks.items():
        num_peers = settings.num_peers(name)
        if size * num_peers > machine.num_cores:
            raise ValueError(
                f"{_size_flag(settings, name)}: {_with_peers(settings, name)} would have {size * num_peers} ranks on "
                f"{machine.num_cores} cores; they wait for each other in every step, so each needs a core of its own"
            )
    threads = _threads(settings, machine, names)
    said = ", ".join(f"{name} {_ranks(*settings.parallel_sizes(name))}{_sharing(settings, name)}" for name in names)
    return f"{said}; {sum(ranks.values())} ranks on {machine.num_cores} cores, threads of each: {threads}"


def _eplb(settings: OwnSettings) -> list[str]:
    """Of a node whose ranks have whole experts."""
    stated = [] if settings.eplb_config is None else [f"--eplb-config={settings.eplb_config}"]
    return ["--enable-eplb", *stated] if settings.enable_eplb else []


def _check_no_prefill(settings: OwnSettings) -> None:
    for name in ("prefill_tensor_parallel_size", "prefill_pipeline_parallel_size", "prefill_data_parallel_size"):
        if (getattr(settings, name) or 1) > 1:
            raise ValueError(f"{flag_name(name)}: there are no prefill nodes with --prefill 0")


def _check_eplb(settings: OwnSettings) -> None:
    """Here, since only nodes with several ranks get the flags."""
    if settings.eplb_config is not None and not settings.enable_eplb:
        raise ValueError("--eplb-config: only goes with --enable-eplb")
    if settings.enable_eplb and not settings.enable_expert_parallel:
        raise ValueError("--enable-eplb: moves whole experts, which needs --enable-expert-parallel")
    if settings.enable_eplb and settings.prefill_pipeline_parallel_size > 1:
        raise ValueError(f"--enable-eplb: not with stages, of {flag_name('prefill_pipeline_parallel_size')}")


def _placement_on_gpus(settings: OwnSettings, machine: Machine, ranks: Mapping[str, int]) -> str:
    there = len(machine.gpus)
    if name := next((name for name, size in ranks.items() if size * settings.num_peers(name) > there), None):
        number = f"{ranks[name] * settings.num_peers(name)} ranks, each with a GPU of its own, and there are {there}"
        raise ValueError(f"{_size_flag(settings, name)}: {_with_peers(settings, name)} would have {number}")
    places = _gpus_of(machine, ranks)
    said = ", ".join(
        f"{name} on GPU {' and '.join(machine.gpus[i] for i in places[name])}{_sharing(settings, name)}"
        for name in ranks
    )
    return f"{said}; a rank on each"


def _gpus_of(machine: Machine, ranks: Mapping[str, int]) -> dict[str, list[int]]:
    """Indices into the machine's GPUs: each node takes the next ones, and begins anew after the last."""
    first, places = 0, {}
    for name, size in ranks.items():
        places[name] = [(first + rank) % len(machine.gpus) for rank in range(size)]
        first += size
    return places


def _ranks(tensor: int, stages: int) -> str:
    number = f"{tensor * stages} rank{'s' if tensor * stages > 1 else ''}"
    return number if stages == 1 else f"{number} in {stages} stages"


def _sharing(settings: OwnSettings, name: str) -> str:
    return f" with experts shared with {settings.num_peers(name) - 1} more" if settings.num_peers(name) > 1 else ""


def _with_peers(settings: OwnSettings, name: str) -> str:
    return f"{name} and its peers" if settings.num_peers(name) > 1 else name


def _size_flag(settings: OwnSettings, name: str) -> str:
    """The one that gave this node several ranks, or else peers."""
    if settings.num_ranks(name) > 1:
        return _rank_flag(settings, {name: settings.num_ranks(name)})
    own = f"{name.split('-')[0]}_data_parallel_size"
    return flag_name(own if getattr(settings, own) else "data_parallel_size")


def _rank_flag(settings: OwnSettings, ranks: Mapping[str, int]) -> str:
    """The one that gave the first of these nodes several ranks, or most of them."""
    name = next(name for name, size in ranks.items() if size > 1)
    tensor, stages = settings.parallel_sizes(name)
    if stages > tensor:
        return flag_name("prefill_pipeline_parallel_size")
    own = f"{name.split('-')[0]}_tensor_parallel_size"
    return flag_name(own if getattr(settings, own) else "tensor_parallel_size")


_PARALLEL = "tensor_parallel_size", "pipeline_parallel_size"
"""The flags of a node for what `OwnSettings.parallel_sizes` says."""


def _threads(settings: OwnSettings, machine: Machine, names: Sequence[str]) -> int:
    """Of each rank."""
    return settings.cpu_threads or max(1, machine.num_cores // sum(map(settings.num_ranks, names)))


def _data_parallel(settings: OwnSettings, name: str, ports: Mapping[str, NodePorts]) -> list[str]:
    size, (first, rank) = settings.num_peers(name), peers_of(settings, name)
    if size == 1:
        return []
    at = ports[first].peers
    assert at is not None
    flags = {"size": size, "rank": rank, "address": at.host, "rpc_port": at.port}
    return [f"{flag_name(f'data_parallel_{flag}')}={value}" for flag, value in flags.items()]


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without baton's settings, which are read here and handed on as flags."""
    return {name: value for name, value in environ.items() if not name.upper().startswith(ENV_PREFIX)}


def _kv_events(settings: OwnSettings, index: int) -> list[str]:
    """The node's own endpoints. A node refuses what is no configuration, by name."""
    stated: str | None = getattr(settings, "kv_events_config", None)
    if stated is None:
        return []
    with contextlib.suppress(ValueError):
        stated = KvEventsConfig.parse(stated).of_node(index).model_dump_json(exclude_defaults=True)
    return [f"--kv-events-config={stated}"]


@dataclass(frozen=True, slots=True)
class _Gpu:
    """Arguments and environment of a node for the GPUs that it gets, or for its part of the memory."""

    arguments: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


def _gpus(settings: OwnSettings, machine: Machine, names: Sequence[str]) -> dict[str, _Gpu]:
    if settings.device == "cpu" or not machine.gpus:
        return dict.fromkeys(names, _Gpu(_pool(settings, machine, names)))
    chosen = _gpus_of(machine, {name: settings.num_ranks(name) for name in names})
    nodes_on = Counter(chain.from_iterable(chosen.values()))
    gpus = {}
    for name, own in chosen.items():  # a node sees the others' GPUs as well, since their slots are mapped
        order = (*(machine.gpus[i] for i in own), *(gpu for i, gpu in enumerate(machine.gpus) if i not in own))
        share = settings.gpu_memory_utilization / max(nodes_on[gpu] for gpu in own)
        gpus[name] = _Gpu((f"--gpu-memory-utilization={share:.4g}",), {"CUDA_VISIBLE_DEVICES": ",".join(order)})
    return gpus


def _pool(settings: OwnSettings, machine: Machine, names: Sequence[str]) -> tuple[str, ...]:
    """On a CPU: a share of half of the memory for each rank, where that is less than it would take by itself."""
    sizes = (getattr(settings, name, None) for name in ("kv_cache_memory_bytes", "num_gpu_blocks_override", "profile"))
    if machine.memory_bytes is None or any(size is not None for size in sizes):  # a profile has a size of its own
        return ()
    share = machine.memory_bytes // 2 // sum(map(settings.num_ranks, names))
    return (f"--kv-cache-memory-bytes={share}",) if share < CPU_POOL_BYTES else ()


def _router(settings: OwnSettings, http: HostPort, grpc: HostPort, ports: Mapping[str, NodePorts]) -> Child:
    def addresses(role: str) -> str:
        return ",".join(str(p.listen) for name, p in ports.items() if name.startswith(role))

    arguments = (
        *settings.router_flags(),
        "--node-id=router",
        *([f"--prefill={addresses('prefill')}"] if settings.prefill else []),
        f"--decode={addresses('decode')}",
        f"--http={http}",
        f"--grpc={grpc}",
    )
    return Child("router", "router.main", arguments, settings.router_env())
