"""Which transports work on this machine, and why others do not: each is made as a node makes it."""

from __future__ import annotations

from collections.abc import Iterator

from baton.errors import TransferError
from deploy.doctor.child import ChildFailed, call
from deploy.doctor.finding import Finding, failure, ok, skipped, warning
from deploy.doctor.gpus import TORCH_S
from deploy.doctor.versions import installed_version
from kv_transfer import TRANSPORTS
from kv_transfer.transports.host import rdma_devices
from node.preflight import num_gpus, why_no_transport

_SLOT_BYTES = 1 << 20


def findings(wanted: str, device: str, interface: str | None) -> Iterator[Finding]:
    """wanted: the one that nodes are to use."""
    if installed_version("torch") is None:
        yield skipped("transports", "torch is not installed: a router moves no KV.")
        return
    for name in TRANSPORTS:
        if name != "memory":
            yield transport(name, name == wanted, device, interface)
    yield rdma(wanted, device)


def transport(name: str, is_wanted: bool, device: str, interface: str | None) -> Finding:
    check = f"transport {name}"
    if problem := why_no_transport(name, device):
        how = "Install what it needs, or choose another --transport."
        return failure(check, f"{problem}.", how) if is_wanted else skipped(check, f"{problem}.")
    try:
        problem = call(why_not, TORCH_S, name, device, interface)
    except ChildFailed as error:
        problem = str(error)
    if problem is None:
        return ok(check, f"It works between {'GPUs' if on_gpu(device) else 'CPUs'} of this machine.")
    text, do = f"It cannot be used: {problem}.", "Reinstall its package (pip install --force-reinstall), or do without."
    return failure(check, text, do) if is_wanted else warning(check, text, do)


def why_not(name: str, device: str, interface: str | None) -> str | None:
    """Make a transport over small slots and close it; None: it works. In a process of its own."""
    import kv_transfer

    try:
        staging = kv_transfer.staging_for(name, 2, _SLOT_BYTES, "cuda" if on_gpu(device) else "cpu")
        kv_transfer.create(name, staging, lambda: None, interface).close()
    except TransferError as error:
        return error.message.rstrip(".")
    return None


def rdma(wanted: str, device: str) -> Finding:
    """Whether KV for other machines can leave over RDMA."""
    devices = ", ".join(rdma_devices())
    if not devices:
        return skipped("RDMA", "There is no RDMA device: KV for other machines travels over TCP.")
    if wanted != "ucx":
        return ok("RDMA", f"There is {devices}.")
    try:
        problem = call(why_ucx_has_no_rdma, TORCH_S, device)
    except ChildFailed as error:
        problem = str(error)
    if problem is None:
        return ok("RDMA", f"There is {devices}, and UCX has verbs.")
    return warning("RDMA", f"KV goes {problem}.", "Without RDMA a fast network is used at a fraction of its speed.")


def why_ucx_has_no_rdma(device: str) -> str | None:
    """In a process of its own."""
    import ucxx  # noqa: F401 - loads UCX's libraries, which the next line needs
    from ucxx._lib import libucxx

    from kv_transfer.transports.ucx.path import look, no_rdma

    return no_rdma(look(on_gpu(device), True, libucxx.UCXContext({}).info))


def on_gpu(device: str) -> bool:
    return device != "cpu" and num_gpus() > 0
