"""Reports settings that cannot work on this machine within a second, before torch is imported and weights load."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from pathlib import Path

from baton.address import HostPort
from baton.node_info import MAX_MODEL_ALIASES, MAX_MODEL_CHARS
from baton.process.listening import listen_socket
from baton.process.open_files import max_open_files, why_too_few
from baton.process.resources import memory_bytes
from baton.process.threads import why_too_few_threads
from baton.structured_output import xgrammar_compiler
from baton.telemetry.admin import read_key
from baton.wire.limits import MAX_NAME_CHARS
from engine.checkpoint import local_folder, why_no_checkpoint, why_no_tokenizer, why_no_weights
from engine.simulated.profile import load_profile
from kv_transfer import NIXL_PACKAGES
from node.errors import StartupError
from node.kv_events_config import KvEventsConfig
from node.settings import NodeSettings

_PACKAGES = {"ucx": (("ucxx",), "node"), "nixl": (NIXL_PACKAGES, "nixl")}
"""The package that a transport imports, under one of its names, and the extra that installs it."""
KV_EVENTS_PACKAGES = ("zmq", "msgspec")


def check(settings: NodeSettings) -> None:
    """Raise StartupError with one line that names the flag."""
    if too_few := why_too_few(max_open_files()) or why_too_few_threads():
        raise StartupError(too_few)
    _check_working_directory()
    if settings.node_rank == 0:
        _check_kv_events(settings)
        require_free("--listen", settings.listen)
        require_free("--metrics-port", settings.metrics_listen)
    if settings.node_rank == 0 and settings.nnodes > 1:
        require_free("--master-addr, --master-port", HostPort(settings.master_addr, settings.master_port))
    _check_admin_key(settings)
    _check_profile_dir(settings)
    _check_chat_template(settings)
    if settings.engine == "simulated":
        _check_profile(settings)
        return
    _check_model(settings)
    _check_device(settings)
    _check_ranks(settings)
    _check_transport(settings)
    _check_structured_outputs(settings)
    _check_pool(settings)


def check_names(settings: NodeSettings) -> None:
    """Check the names of this node and its model now; otherwise routers would refuse the node again and again. Raises
    StartupError."""
    models, unset = settings.served_model_name, ""
    if not models:
        models, unset = (settings.model,), ", and is --model if unset"
    if len(models) > 1 + MAX_MODEL_ALIASES:
        raise StartupError(f"--served-model-name: at most {1 + MAX_MODEL_ALIASES} names, not {len(models)}")
    for flag, name, most, more in (
        ("--node-id", settings.node_id or "", MAX_NAME_CHARS, ""),
        *[("--served-model-name", model, MAX_MODEL_CHARS, unset) for model in models],
    ):
        if len(name) > most or not name.isprintable():
            raise StartupError(f"{flag}: must be a printable text of at most {most} characters{more}, not {name!r}")


def require_free(flag: str, listen: HostPort) -> None:
    """Report a busy port now, not after the model is loaded. Raises StartupError."""
    try:
        listen_socket(listen).close()
    except OSError as error:
        raise StartupError(f"{flag}: cannot listen on {listen}: {error.strerror}") from None


def _check_working_directory() -> None:
    """Without a working directory, oneMKL ends the process, saying that it cannot load torch."""
    try:
        Path.cwd()
    except OSError as error:
        raise StartupError(f"the working directory is gone: {error.strerror}") from None


def _check_kv_events(settings: NodeSettings) -> None:
    stated = settings.kv_events_config
    if stated is None or not KvEventsConfig.parse(stated).publishes:
        return
    for name in KV_EVENTS_PACKAGES:
        if importlib.util.find_spec(name) is None:
            raise StartupError(f"--kv-events-config: needs the package {name}: pip install 'baton-serve[kv-events]'")


def _check_admin_key(settings: NodeSettings) -> None:
    if settings.admin_key_file is None:
        return
    try:
        read_key(settings.admin_key_file)
    except ValueError as error:
        raise StartupError(f"--admin-key-file: {error}") from None


def _check_profile_dir(settings: NodeSettings) -> None:
    folder = settings.profile_dir
    if folder is not None and not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        raise StartupError(f"--profile-dir: {folder} is no folder that this process may write to")


def _check_chat_template(settings: NodeSettings) -> None:
    try:
        settings.read_chat_template()
    except ValueError as error:
        raise StartupError(str(error)) from None


def _check_model(settings: NodeSettings) -> None:
    """Check a local folder; a hub's model is checked after its download."""
    folder = local_folder(settings.model)
    if folder is None:
        return
    problem = why_no_checkpoint(folder)
    if settings.load_format != "dummy":  # dummy needs config.json only
        problem = problem or why_no_tokenizer(folder) or why_no_weights(folder)
    if problem:
        raise StartupError(f"--model {settings.model}: {problem}")


def _check_profile(settings: NodeSettings) -> None:
    assert settings.profile is not None
    try:
        load_profile(settings.profile)
    except ValueError as error:
        raise StartupError(str(error)) from None


def _check_device(settings: NodeSettings) -> None:
    if settings.device == "cuda" and not num_gpus():
        raise StartupError("--device: cuda is not available on this machine")


def _check_ranks(settings: NodeSettings) -> None:
    if settings.num_ranks == 1 or settings.device == "cpu" or not (there := num_gpus()):
        return
    if (num_here := len(settings.host_ranks)) > there:
        flag = "--tensor-parallel-size" if settings.pipeline_parallel_size == 1 else "--pipeline-parallel-size"
        raise StartupError(f"{flag}: {num_here} ranks need a GPU each, and this process sees {there}")
    in_groups = settings.kv_layer_groups is not None and settings.kv_layer_groups > 1
    if in_groups and (settings.pipeline_parallel_size > 1 or settings.nnodes > 1):
        raise StartupError("--kv-layer-groups: stages and several hosts send what a step computed when it is done")


def _check_transport(settings: NodeSettings) -> None:
    if problem := why_no_transport(settings.transport, settings.device):
        raise StartupError(f"--transport: {problem}")


def why_no_transport(transport: str, device: str) -> str | None:
    """Why a node cannot use that transport, as far as that can be known before torch is imported; None: no reason was
    found."""
    if transport == "nccl" and (device == "cpu" or not num_gpus()):
        return "nccl moves KV between GPUs, and this node has none"
    names, extra = _PACKAGES.get(transport, ((), ""))
    if names and not any(importlib.util.find_spec(name) for name in names):
        return f"{transport} needs the package {names[0]}: pip install 'baton-serve[{extra}]'"
    return None


def _check_structured_outputs(settings: NodeSettings) -> None:
    if settings.structured_outputs_backend == "xgrammar" and not xgrammar_compiler.is_installed():
        raise StartupError(
            "--structured-outputs-backend: xgrammar needs the package xgrammar: pip install 'baton-serve[xgrammar]'"
        )


def _check_pool(settings: NodeSettings) -> None:
    """Check the pool's size on a CPU, where allocating too much memory fails only when it is written to."""
    wanted = settings.kv_cache_memory_bytes
    if wanted is None or (settings.device != "cpu" and num_gpus()):
        return
    there, num_here = memory_bytes(), len(settings.host_ranks)
    if wanted * num_here > there:
        each = f" for each of {num_here} ranks" if num_here > 1 else ""
        raise StartupError(f"--kv-cache-memory-bytes: {wanted}{each} are more than the {there} that may be used")


def num_gpus() -> int:
    """GPUs visible to this process, according to the CUDA driver, as for torch."""
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        ok = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    except (OSError, AttributeError):
        return 0
    return count.value if ok else 0
