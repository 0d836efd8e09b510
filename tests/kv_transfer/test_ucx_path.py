"""Which way UCX takes, and what is said of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kv_transfer.transports.ucx.path import Machine, look, slowness
from tests.kv_transfer.rig import rig_of

GPU = Machine(
    on_gpu=True,
    exportable=True,
    tls="",
    resources=frozenset({"tcp/eth0", "posix/memory", "cuda_copy/cuda", "cuda_ipc/cuda"}),
    shm_bytes=1 << 34,
    rdma=(),
)
CPU = replace(GPU, on_gpu=False, resources=frozenset({"tcp/eth0", "posix/memory"}))
TCP = ("tcp/lo", "cuda_copy/cuda")
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
RDMA = frozenset({"tcp/eth0", "rc_mlx5/mlx5_0:1"})


@pytest.mark.parametrize(
    ("machine", "path", "same_host"),
    [
        (GPU, ("tcp/lo", "cuda_ipc/cuda"), True),
        (GPU, ("rc_mlx5/mlx5_0:1",), False),
        (GPU, TCP, False),  # there is nothing better
        (CPU, ("tcp/lo",), True),  # shared memory is not used unasked
        (replace(CPU, tls="posix,self"), ("posix/memory",), True),
        (CPU, ("tcp/eth0",), False),
        (GPU, (), True),  # UCX does not say
    ],
)
def test_a_good_way_is_no_news(machine: Machine, path: tuple[str, ...], same_host: bool) -> None:
    assert slowness(machine, path, same_host) is None


@pytest.mark.parametrize(
    ("machine", "path", "same_host", "says"),
    [
        (replace(GPU, tls="tcp,cuda_copy"), TCP, True, "UCX_TLS=tcp,cuda_copy leaves cuda_ipc out"),
        (replace(GPU, exportable=False), TCP, True, "PYTORCH_CUDA_ALLOC_CONF"),
        (replace(GPU, resources=CPU.resources), TCP, True, "UCX has no cuda_ipc here"),
        (GPU, TCP, True, "--ipc=host"),
        (replace(CPU, tls="shm,tcp", shm_bytes=64 << 20), ("tcp/lo",), True, "/dev/shm has 64 MiB left"),
        (replace(CPU, tls="shm,tcp", resources=frozenset({"tcp/lo"})), ("tcp/lo",), True, "UCX cannot use it"),
        (replace(CPU, tls="shm,tcp"), ("tcp/lo",), True, "containers need --ipc=host"),
        (replace(GPU, rdma=("mlx5_0",)), TCP, False, "this one has mlx5_0: this UCX was built without verbs"),
        (replace(GPU, rdma=("mlx5_0",), resources=RDMA), TCP, False, "--transfer-interface leaves it out"),
    ],
)
def test_a_slow_way_is_told_with_its_reason(
    machine: Machine, path: tuple[str, ...], same_host: bool, says: str
) -> None:
    assert says in (slowness(machine, path, same_host) or "")


def test_a_machine_is_read_from_what_ucx_says() -> None:
    said = "# md 0 : component 1 tcp\n#  resource 0  :  md 0  dev 1  flags -- tcp/eth0\n#\n"
    machine = look(on_gpu=False, exportable=True, context_info=said)
    assert machine.resources == {"tcp/eth0"}
    assert machine.shm_bytes > 0


@pytest.mark.parametrize(("kind", "carrier"), [("ucx-shm", "posix"), ("ucx-tcp", "tcp")])
def test_the_way_to_a_peer_is_told(kind: str, carrier: str) -> None:
    with rig_of(kind) as rig:
        sender, receiver = rig.node("sender"), rig.node("receiver")
        rig.link(sender, receiver)
        (told,) = sender.call("told", "kv path")
        assert f"peer={receiver.name}" in told
        assert carrier in told
        assert not sender.call("told", "slow")


@NEEDS_GPU
@pytest.mark.gpu
def test_gpus_of_one_host_take_cuda_ipc() -> None:
    with rig_of("ucx", on_gpu=True) as rig:
        sender, receiver = rig.node("sender"), rig.node("receiver")
        rig.link(sender, receiver)
        assert "cuda_ipc" in sender.call("told", "kv path")[0]
        assert not sender.call("told", "slow")


@NEEDS_GPU
@pytest.mark.gpu
def test_gpus_without_cuda_ipc_are_told_why() -> None:
    with rig_of("ucx-tcp", on_gpu=True) as rig:
        sender, receiver = rig.node("sender"), rig.node("receiver")
        rig.link(sender, receiver)
        assert "leaves cuda_ipc out" in sender.call("told", "slow")[0]
