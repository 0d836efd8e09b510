"""Checks of the GPUs: what the driver says of them (nvidia-smi), and what torch can do with them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deploy.doctor.child import ChildFailed, call
from deploy.doctor.finding import Finding, failure, ok, skipped, warning
from deploy.doctor.versions import installed_version

TORCH_S = 120.0
"""A cold disk takes a minute to import torch."""
_SMI_S = 30.0
_FIELDS = "index,name,driver_version,memory.total,memory.used,persistence_mode"
MIN_CAPABILITY = (8, 0)
"""bfloat16, and what the kernels are compiled for."""
BUSY = 0.1


@dataclass(frozen=True, slots=True)
class Gpu:
    """As nvidia-smi lists it; memory in MiB."""

    index: str
    name: str
    driver: str
    total_mib: float
    used_mib: float
    persistence: str


@dataclass(frozen=True, slots=True)
class TorchView:
    """What torch sees. error: why it sees no GPU, if CUDA says so. no_peer_access: pairs of GPUs of which the first
    cannot reach the second's memory."""

    cuda: str
    capabilities: tuple[tuple[int, int], ...] = ()
    no_peer_access: tuple[tuple[int, int], ...] = ()
    error: str = ""


def findings(device: str = "auto") -> Iterator[Finding]:
    gpus, reason = list_gpus()
    if installed_version("torch") is None:
        yield skipped("GPUs", f"{_listed(gpus, reason)}, and torch is not installed: a router needs neither.")
        return
    try:
        view = call(look, TORCH_S)
    except ChildFailed as error:
        yield failure("GPUs", f"torch cannot be imported: {error}.", "pip install --force-reinstall torch")
        return
    yield visible(gpus, reason, view, device)
    for gpu in gpus:
        yield memory(gpu)
        yield persistence(gpu)
    for index, capability in enumerate(view.capabilities):
        yield capable(index, capability)
    if len(view.capabilities) > 1:
        yield peer_access(len(view.capabilities), view.no_peer_access)


def list_gpus() -> tuple[list[Gpu], str]:
    """The GPUs, or why there are none."""
    command = ["nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_S, check=False)
    except FileNotFoundError:
        return [], "there is no nvidia-smi"
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi does not answer: {error}"
    if ran.returncode:
        return [], f"nvidia-smi: {' '.join((ran.stdout + ran.stderr).split())[:200]}"
    return parse(ran.stdout), ""


def parse(text: str) -> list[Gpu]:
    gpus = []
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == len(_FIELDS.split(",")):
            index, name, driver, total, used, mode = words
            gpus.append(Gpu(index, name, driver, _number(total), _number(used), mode))
    return gpus


def look() -> TorchView:
    """In a process of its own."""
    import torch

    cuda = torch.version.cuda or ""
    try:
        count = torch.cuda.device_count()
        if count:
            torch.zeros(1, device="cuda")
    except Exception as error:  # noqa: BLE001 - CUDA's errors have no other common class
        return TorchView(cuda, error=str(error).splitlines()[0])
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    return TorchView(
        cuda,
        tuple(torch.cuda.get_device_capability(index) for index in range(count)),
        tuple(pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)),
    )


def visible(gpus: Sequence[Gpu], reason: str, view: TorchView, device: str) -> Finding:
    """Whether torch sees the GPUs that are there."""
    check = "GPUs"
    if view.error:
        text = f"torch for CUDA {view.cuda} cannot use a GPU: {view.error}."
        return failure(check, text, "Install a driver for that CUDA, or a torch for this driver.")
    if view.capabilities:
        return ok(check, f"torch for CUDA {view.cuda} sees {len(view.capabilities)}; {_listed(gpus, reason)}.")
    if gpus and device != "cpu" and not view.cuda:
        text = f"{_listed(gpus, reason)}, and the torch that is installed is for CPUs."
        return failure(check, text, "Install torch for CUDA, or set --device cpu.")
    if gpus and device != "cpu":
        text = f"{_listed(gpus, reason)}, and torch sees none."
        return failure(check, text, "Look at CUDA_VISIBLE_DEVICES, and at --gpus of the container.")
    if device == "cuda":
        return failure(check, f"--device cuda, and {_listed(gpus, reason)}.", "Install the driver.")
    return skipped(check, f"{_listed(gpus, reason)}: a node would compute on the CPU.")


def capable(index: int, capability: tuple[int, int]) -> Finding:
    check, text = f"GPU {index} capability", f"It has compute capability {capability[0]}.{capability[1]}."
    if capability >= MIN_CAPABILITY:
        return ok(check, text)
    return warning(check, text, "Below 8.0 there is no bfloat16: set --dtype float16, and expect slower kernels.")


def memory(gpu: Gpu) -> Finding:
    check, used = f"GPU {gpu.index} memory", gpu.used_mib / gpu.total_mib if gpu.total_mib else 0.0
    text = f"{gpu.name}: {gpu.used_mib / 1024:.1f} of {gpu.total_mib / 1024:.1f} GiB are in use."
    if used <= BUSY:
        return ok(check, text)
    return warning(check, text, "A node takes --gpu-memory-utilization of all: stop others there, or lower it.")


def persistence(gpu: Gpu) -> Finding:
    check = f"GPU {gpu.index} persistence"
    if gpu.persistence != "Disabled":
        return ok(check, f"Persistence mode is {gpu.persistence.lower()}, driver {gpu.driver}.")
    text = "Persistence mode is off: the driver unloads with the last process, and each start waits for it."
    return warning(check, text, "nvidia-smi -pm 1, or nvidia-persistenced")


def peer_access(num_gpus: int, missing: Sequence[tuple[int, int]]) -> Finding:
    if not missing:
        return ok("GPU peer access", f"All {num_gpus} GPUs reach each other's memory.")
    pairs = ", ".join(f"{one} to {other}" for one, other in missing[:4])
    text = f"{len(missing)} pairs of GPUs do not reach each other's memory ({pairs})."
    do = "KV between them goes through the host: look at nvidia-smi topo -m, IOMMU and ACS settings."
    return warning("GPU peer access", text, do)


def _listed(gpus: Sequence[Gpu], reason: str) -> str:
    return f"nvidia-smi lists {len(gpus)}" if gpus else reason or "nvidia-smi lists no GPU"


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:  # [N/A]
        return 0.0
