"""Settings that cannot work end the start with one line, before torch is imported or weights load."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.structured_output import xgrammar_compiler
from decode_node.settings import DecodeSettings
from engine.checkpoint import local_folder
from node import preflight
from node.errors import StartupError
from node.settings import NodeSettings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As much of a checkpoint as is looked at."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    return tmp_path


def told(model: object, **fields: Any) -> str:
    with pytest.raises(StartupError) as error:
        preflight.check(NodeSettings(model=str(model), **fields))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"served_model_name": "x" * 257}, "--served-model-name: must be a printable text of at most 256 char"),
        ({"served_model_name": "a\nb"}, "--served-model-name: must be a printable text"),
        ({"served_model_name": ("a", "x" * 257)}, "--served-model-name: must be a printable text of at most 256 char"),
        ({"served_model_name": tuple(map(str, range(66)))}, "--served-model-name: at most 65 names, not 66"),
        ({"model": "x" * 257}, "256 characters, and is --model if unset, not"),
        ({"node_id": "x" * 513}, "--node-id: must be a printable text of at most 512 characters, not"),
        ({"node_id": "a\x1b"}, "--node-id: must be a printable text"),
    ],
)
def test_names_that_no_router_takes_are_refused(fields: dict[str, str], says: str) -> None:
    with pytest.raises(StartupError) as error:
        preflight.check_names(NodeSettings(**{"model": "m", **fields}))  # type: ignore[arg-type]
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_names_that_all_take_pass() -> None:
    preflight.check_names(NodeSettings(model="x" * 300, served_model_name="y" * 256, node_id="z" * 512))
    preflight.check_names(NodeSettings(model="x" * 256))


def test_a_chat_template_that_cannot_be_read(folder: Path) -> None:
    (folder / "latin").write_bytes(b"\xff")
    for name in ("none", "latin"):
        assert told(folder, chat_template=folder / name).startswith(f"--chat-template: {folder / name} cannot be read")


def test_what_can_work_passes(folder: Path) -> None:
    for model in (folder, "baton-tiny", "org/model", "gpt2"):
        preflight.check(NodeSettings(model=str(model), device="cpu"))


def test_too_few_open_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "max_open_files", lambda: 127)
    assert told(folder).startswith("open files: a limit of 127 is too low, 128 are needed")


def test_a_working_directory_that_was_removed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert told(folder) == "the working directory is gone: No such file or directory"


def test_too_few_threads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "why_too_few_threads", lambda: "threads: no more than 3 can be started")
    assert told(folder) == "threads: no more than 3 can be started"


@pytest.mark.parametrize("name", ["/nope", "./nope", "../nope", "~/nope-there", "~nobody-there/x", "a/b/c", "."])
def test_a_path_is_a_folder(name: str) -> None:
    assert local_folder(name) is not None
    assert told(name).startswith(f"--model {name}: ")


@pytest.mark.parametrize("name", ["nope", "org/nope", "Qwen/Qwen2.5-7B"])
def test_a_hub_id_is_none(name: str) -> None:
    assert local_folder(name) is None


def test_a_folder_that_lacks_something(folder: Path) -> None:
    assert told(folder / "nope") == f"--model {folder}/nope: there is no such folder"
    assert told(folder / "config.json").endswith("this is a file, not a checkpoint's folder")
    (folder / "model.safetensors").unlink()
    assert told(folder).endswith("the folder has no safetensors weights")
    (folder / "tokenizer.json").unlink()
    assert "the folder has no tokenizer: none of tokenizer.json, " in told(folder)
    preflight.check(NodeSettings(model=str(folder), load_format="dummy", device="cpu"))
    (folder / "config.json").write_text("{")
    assert "config.json cannot be read: " in told(folder, load_format="dummy")
    (folder / "config.json").unlink()
    assert told(folder).endswith("the folder has no config.json")


def test_a_gpu_that_is_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "num_gpus", lambda: 0)
    assert told(folder, device="cuda") == "--device: cuda is not available on this machine"
    assert told(folder, transport="nccl").startswith("--transport: nccl moves KV between GPUs")
    monkeypatch.setattr(preflight, "num_gpus", lambda: 1)
    preflight.check(NodeSettings(model=str(folder), transport="nccl"))
    assert told(folder, transport="nccl", device="cpu").startswith("--transport: nccl moves KV between GPUs")


def test_a_pool_beyond_this_machines_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "num_gpus", lambda: 0)
    assert told(folder, kv_cache_memory_bytes=10**15).startswith("--kv-cache-memory-bytes: 1000000000000000 are more")
    preflight.check(NodeSettings(model=str(folder), kv_cache_memory_bytes=10**6))


def test_pools_of_several_ranks_share_the_memory_that_may_be_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "num_gpus", lambda: 0)
    most = 10**9
    monkeypatch.setattr(preflight, "memory_bytes", lambda: most)
    preflight.check(NodeSettings(model=str(folder), kv_cache_memory_bytes=most // 2, tensor_parallel_size=2))
    says = told(folder, kv_cache_memory_bytes=most // 2, tensor_parallel_size=4)
    assert says == f"--kv-cache-memory-bytes: {most // 2} for each of 4 ranks are more than the {most} that may be used"
    hosts = NodeSettings(model=str(folder), kv_cache_memory_bytes=most // 2, tensor_parallel_size=4, nnodes=2)
    preflight.check(hosts)


def test_a_transports_package_that_is_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(preflight._PACKAGES, "nixl", (("no_such_package",), "nixl"))
    assert told(folder, transport="nixl").endswith("needs the package no_such_package: pip install 'baton-serve[nixl]'")


def test_a_backend_of_structured_outputs_that_is_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xgrammar_compiler, "is_installed", lambda: False)
    says = told(folder, structured_outputs_backend="xgrammar")
    assert says.endswith("needs the package xgrammar: pip install 'baton-serve[xgrammar]'")
    monkeypatch.setattr(xgrammar_compiler, "is_installed", lambda: True)
    preflight.check(NodeSettings(model=str(folder), structured_outputs_backend="xgrammar"))


def test_packages_of_kv_events_that_are_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "KV_EVENTS_PACKAGES", ("zmq", "no_such_package"))
    preflight.check(NodeSettings(model=str(folder), device="cpu", kv_events_config="{}"))
    refusal = told(folder, device="cpu", kv_events_config='{"enable_kv_cache_events": true}')
    assert refusal.startswith("--kv-events-config")
    assert "'baton-serve[kv-events]'" in refusal


def test_kv_events_that_are_no_configuration_are_refused_before_anything_loads(folder: Path) -> None:
    with pytest.raises(ValueError, match="--kv-events-config: endpont"):
        NodeSettings(model=str(folder), kv_events_config='{"endpont": "tcp://*:5557"}')


def test_an_admin_key_that_is_not_there(folder: Path) -> None:
    (folder / "key").write_text(" \n")
    assert told(folder, admin_key_file=folder / "key") == f"--admin-key-file: {folder}/key is empty"
    assert told(folder, admin_key_file=folder / "no").startswith("--admin-key-file: cannot read ")


def test_it_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; import node.preflight"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("own", "reason"),
    [
        (
            {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
            "--pipeline-parallel-size: 4 ranks need a GPU each, and this process sees 2",
        ),
        ({"tensor_parallel_size": 4}, "--tensor-parallel-size: 4 ranks need a GPU each, and this process sees 2"),
        (
            {"pipeline_parallel_size": 2, "kv_layer_groups": 4},
            "--kv-layer-groups: stages and several hosts send what a step computed when it is done",
        ),
    ],
)
def test_ranks_need_a_gpu_each(own: dict[str, int], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "num_gpus", lambda: 2)
    assert told("baton-tiny", **own) == reason
    settings = NodeSettings(model="baton-tiny", tensor_parallel_size=2)
    preflight.check(settings)
    assert settings.layer_groups(on_gpu=True) == 4
    assert settings.captures_graphs
    staged = NodeSettings(model="baton-tiny", pipeline_parallel_size=2)
    preflight.check(staged)
    assert not staged.captures_graphs
    assert staged.layer_groups(on_gpu=True) == settings.layer_groups(on_gpu=False) == 1


def test_ranks_of_other_hosts_need_no_gpu_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "num_gpus", lambda: 2)
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 3, "nnodes": 3}
    preflight.check(NodeSettings(model="baton-tiny", node_rank=1, **sizes))  # type: ignore[arg-type]
    told_ = told("baton-tiny", **(sizes | {"nnodes": 1}))
    assert told_ == "--pipeline-parallel-size: 6 ranks need a GPU each, and this process sees 2"


def test_only_the_first_host_needs_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        sizes: dict[str, Any] = {"device": "cpu", "pipeline_parallel_size": 2, "nnodes": 2}
        at: dict[str, Any] = {"listen": f"127.0.0.1:{port}", "master_port": port}
        preflight.check(NodeSettings(model="baton-tiny", node_rank=1, **sizes, **at))
        for name, flag in (("listen", "--listen"), ("master_port", "--master-addr, --master-port")):
            reason = told("baton-tiny", **sizes, **{name: at[name]})
            assert reason == f"{flag}: cannot listen on 127.0.0.1:{port}: Address already in use"


def test_stages_are_refused_by_the_flag_where_there_are_none() -> None:
    with pytest.raises(ValueError, match="--pipeline-parallel-size: for prefill nodes only"):
        DecodeSettings(model="baton-tiny", pipeline_parallel_size=2)
    with pytest.raises(ValueError, match="--pipeline-parallel-size: a simulated node has one rank"):
        NodeSettings(model="m", engine="simulated", profile="h200-8b", pipeline_parallel_size=2)
