"""From a checkpoint on disk to an engine and a description."""

import hashlib
import json
import logging
import re
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from baton.settings import flag_name
from decode_node.node import make_role
from decode_node.settings import DecodeSettings
from engine.checkpoint import EMBEDDED
from engine.model.errors import ModelNotFound, UnsupportedModel
from engine.model.fast.tally import FusedReport, Tally
from engine.model.load import loader
from engine.model.load.checkpoint import Checkpoint
from node.build import build
from node.errors import StartupError
from node.parts import assemble
from node.peers.rendezvous import mismatch
from node.ranks import part, pool_size
from node.ranks.joining import shared_flags
from node.ranks.kv_layout import fingerprint_of
from node.settings import NodeSettings
from node.tokenizer import read_tokenizer
from prefill_node.settings import PrefillSettings
from tests.engine import tiny_models
from tests.node.tiny_checkpoint import TEMPLATE, save_tiny

ROLES = (PrefillSettings, DecodeSettings)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.set_num_threads(1)
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def settings(checkpoint, **fields) -> NodeSettings:
    return NodeSettings(model=str(checkpoint), device="cpu", cpu_threads=1, **fields)


def test_a_checkpoint_becomes_an_engine_and_all_that_a_router_needs(checkpoint):
    built = build(settings(checkpoint, served_model_name="tiny", max_num_seqs=4, num_gpu_blocks_override=40))
    config = built.engine.config
    assert (config.max_model_len, config.vocab_size, config.eos_token_ids) == (256, 258, (0,))
    assert built.engine.blocks.num_total == 40
    assert built.pools[0].shape == (41, built.layout.block_bytes)
    assert built.layout.layers[0].dtype == "float32"
    assert built.served_model_name == "tiny"
    assert built.tokenizer.chat_template == TEMPLATE
    assert built.tokenizer.special_tokens == {"bos_token": "<bos>", "eos_token": "<eos>"}
    defaults = built.checkpoint.generation_defaults
    assert (defaults.temperature, defaults.top_k) == (0.5, 7)
    tokenizer = Tokenizer.from_str(built.tokenizer.json.decode())
    assert tokenizer.decode(tokenizer.encode("añb").ids) == "añb"
    assert built.tokenizer.digest == hashlib.sha256(built.tokenizer.json).hexdigest()


@pytest.mark.parametrize(
    ("stated", "text", "expected"),
    [([5], "<eos>", (5, 0)), (0, "<eos>", (0,)), (5, None, (5,)), (5, "beyond the vocabulary", (5,))],
)
def test_answers_end_at_the_tokenizers_eos_too(checkpoint, tmp_path, stated, text, expected):
    """Fine-tunes for chats often keep the base model's generation_config.json."""
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stated}))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": text}))
    built = build(settings(folder))
    assert built.engine.config.eos_token_ids == built.generation_defaults.eos_token_ids == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", "[]"),
        ("tokenizer.json", "[" * 100_000),
        ("tokenizer.json", json.dumps({"version": "9.0", "added_tokens": [], "model": {}})),
        ("tokenizer_config.json", '{"eos_token": 5}'),
    ],
    ids=["no-object", "deep", "another-version", "no-text"],
)
def test_a_tokenizer_that_cannot_be_read_ends_the_start_with_one_line(checkpoint, tmp_path, name, text):
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    (folder / name).write_text(text)
    with pytest.raises(UnsupportedModel, match=r"the tokenizer cannot be loaded: [^\n]+$"):
        build(settings(folder))


def test_layers_with_a_window_have_blocks_of_their_own(tmp_path):
    """Of two layers the first has a window of 20."""
    folder = tiny_models.save(tiny_models.CONFIGS["gemma2"], tmp_path)
    flags = {"load_format": "dummy", "max_model_len": 200, "max_num_batched_tokens": 32, "max_num_seqs": 2}
    split = build(settings(folder, **flags))
    assert split.layout.groups == ((1,), (0,))
    assert split.engine.config.windows == split.layout.windows == (None, 20)
    assert split.engine.blocks.num_total == 2 * (13 + 5), (
        "13 blocks of 16 tokens, and what a window and 32 tokens touch"
    )
    whole = build(settings(folder, disable_hybrid_kv_cache_manager=True, **flags))
    assert (whole.layout.groups, whole.engine.config.windows) == ((), (None,))
    assert whole.layout.block_bytes == 2 * split.layout.block_bytes
    assert whole.engine.blocks.num_total == 2 * 13
    short = build(settings(folder, **flags | {"max_model_len": 20}))
    assert short.layout.groups == split.layout.groups
    assert not short.engine.tables.has_windows, "nothing is ever behind it"
    with pytest.raises(ValueError, match="--num-gpu-blocks-override must be at least 18"):
        build(settings(folder, num_gpu_blocks_override=17, **flags))


def test_the_pool_is_as_large_as_told_or_as_could_ever_be_filled(checkpoint):
    by_bytes = build(settings(checkpoint, kv_cache_memory_bytes=1_000_000))
    assert by_bytes.engine.blocks.num_total == 1_000_000 // by_bytes.layout.block_bytes
    by_need = build(settings(checkpoint, max_num_seqs=2, max_model_len=100))
    assert by_need.engine.blocks.num_total == 2 * 7


def test_the_pool_takes_a_quarter_of_the_memory_that_the_process_may_use(checkpoint, monkeypatch):
    block_bytes = build(settings(checkpoint, num_gpu_blocks_override=40)).layout.block_bytes
    monkeypatch.setattr(pool_size, "memory_bytes", lambda: 4 * 100 * block_bytes)
    assert build(settings(checkpoint)).engine.blocks.num_total == 100
    monkeypatch.setattr(pool_size, "memory_bytes", lambda: 4 * 10 * block_bytes)
    with pytest.raises(ValueError, match=r"--max-model-len: .* lower it to 160 or less, or raise --kv-cache-memory"):
        build(settings(checkpoint))


@pytest.mark.parametrize(("torch_s", "allowed", "used"), [(5, 2, 2), (2, 64, 2), (3, 1, 1)])
def test_torch_has_no_more_threads_than_the_process_has_cpus(checkpoint, monkeypatch, torch_s, allowed, used):
    """torch's own choice heeds OMP_NUM_THREADS, but no quota."""
    monkeypatch.setattr(part, "num_cpus", lambda: allowed)
    torch.set_num_threads(torch_s)
    try:
        build(settings(checkpoint, num_gpu_blocks_override=40).model_copy(update={"cpu_threads": None}))
        assert torch.get_num_threads() == used
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"max_model_len": 1000}, "--max-model-len: 1000 is beyond the model's context of 256"),
        ({"num_gpu_blocks_override": 3}, "--num-gpu-blocks-override must be at least 16"),
        ({"device": "cuda"}, "--device: cuda is not available"),
    ],
)
def test_what_cannot_work_is_named_by_its_flag(checkpoint, fields, text):
    if fields.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ValueError, match=text):
        build(NodeSettings(model=str(checkpoint), cpu_threads=1, **{"device": "cpu"} | fields))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "has no tokenizer"),
        ({"num_gpu_blocks_override": 3}, "--num-gpu-blocks-override must be at least 16"),
        ({"max_model_len": 1000}, "--max-model-len: 1000 is beyond"),
        ({"kv_cache_dtype": "fp8", "block_size": 12}, "--block-size: must be a multiple of 8 with"),
    ],
)
def test_it_is_told_before_weights_load(checkpoint, tmp_path, monkeypatch, fields, text):
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    if not fields:
        (folder / "tokenizer.json").unlink()
    monkeypatch.setattr(loader, "load_model", lambda *_: pytest.fail("the weights were loaded"))
    with pytest.raises(ValueError, match=text):
        build(settings(folder, **fields))


def test_slots_that_do_not_fit_are_named_by_their_flags(checkpoint):
    with pytest.raises(ValueError, match="--kv-slots, --kv-slot-blocks: lower them"):
        assemble(make_role, settings(checkpoint, num_gpu_blocks_override=40, kv_slot_blocks=10**8), lambda: None)


def test_a_pool_that_does_not_fit_is_named_by_its_flags(checkpoint):
    with pytest.raises(ValueError, match=r"--num-gpu-blocks-override, .* lower what was set"):
        build(settings(checkpoint, num_gpu_blocks_override=10**9))


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(ModelNotFound, match="has no config"):
        build(settings(tmp_path))


def test_the_default_of_several_chat_templates_is_taken(checkpoint, tmp_path):
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    path.write_text(json.dumps(config))
    assert build(settings(tmp_path)).tokenizer.chat_template == "A"


@pytest.mark.parametrize("name", NodeSettings.model_fields)
def test_every_flag_says_what_it_is(name):
    assert NodeSettings.model_fields[name].description, flag_name(name)


def test_the_stages_of_the_start_are_logged(checkpoint, caplog):
    with caplog.at_level(logging.INFO):
        build(settings(checkpoint, num_gpu_blocks_override=40))
    stages = [record.getMessage() for record in caplog.records if record.name == "node.ranks.part"]
    assert [re.sub(r"[\w]+=.*", "", text).strip() for text in stages] == ["model loaded", "kv pool"]
    assert all(re.search(r" seconds=\d+\.\d\d$", text) for text in stages)
    assert "kv_blocks=40 " in stages[1]


def test_a_pool_that_cannot_hold_one_request_says_what_could(checkpoint):
    with pytest.raises(
        ValueError, match=r"a request of 256 tokens takes 64 KiB of KV blocks, and there are 10 KiB: lower it to 32 "
    ) as error:
        build(settings(checkpoint, kv_cache_memory_bytes=10_000))
    assert str(error.value).endswith("or raise --kv-cache-memory-bytes (10000)")


def test_dummy_weights_need_no_more_than_a_config(checkpoint, tmp_path):
    shutil.copy(checkpoint / "config.json", tmp_path)
    with pytest.raises(UnsupportedModel, match="has no tokenizer"):
        build(settings(tmp_path))
    built = build(settings(tmp_path, load_format="dummy"))
    assert built.layout.fingerprint != build(settings(checkpoint)).layout.fingerprint
    assert built.tokenizer == read_tokenizer(EMBEDDED["baton-tiny"])


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_a_checkpoints_own_format_may_be_named_on_some_nodes_alone(key, checkpoint, tmp_path):
    form = "compressed-tensors"
    stated = json.loads((checkpoint / "config.json").read_text()) | {key: {"quant_method": form, "config_groups": {}}}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    nodes = (settings(tmp_path, load_format="dummy", quantization=named) for named in (form, None))
    assert len({fingerprint_of(node, Checkpoint.open(tmp_path)) for node in nodes}) == 1


def test_a_folder_without_a_tokenizer_is_named(checkpoint, tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(checkpoint / name, tmp_path)
    with pytest.raises(UnsupportedModel, match=r"has no tokenizer: none of tokenizer\.json"):
        build(settings(tmp_path))


def test_defaults_that_depend_on_role_and_device():
    assert [cls(model="m").batched_tokens(on_gpu) for cls in ROLES for on_gpu in (True, False)] == [
        *(8192, 2048),
        *(2048, 2048),
    ]
    assert [cls(model="m", max_num_batched_tokens=7).batched_tokens(on_gpu=True) for cls in ROLES] == [7, 7]


def test_running_ahead_is_for_gpus_unless_told(checkpoint):
    assert not build(settings(checkpoint)).engine.config.async_scheduling
    assert build(settings(checkpoint, async_scheduling=True)).engine.config.async_scheduling


def test_experts_are_not_divided_on_a_node_of_one_rank() -> None:
    with pytest.raises(
        ValueError, match="--enable-expert-parallel: divides experts among ranks, and --tensor-parallel"
    ):
        NodeSettings(model="none", enable_expert_parallel=True)
    assert NodeSettings(model="none", enable_expert_parallel=True, tensor_parallel_size=2).enable_expert_parallel


DATA_PARALLEL: dict[str, Any] = {"data_parallel_size": 2, "data_parallel_rank": 1, "enable_expert_parallel": True}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"enable_expert_parallel": False}, "--data-parallel-size: goes with --enable-expert-parallel"),
        ({"data_parallel_rank": None}, "--data-parallel-rank: each of the 2 nodes needs one, from 0"),
        ({"data_parallel_rank": 2}, "--data-parallel-rank: each of the 2 nodes needs one, from 0"),
        ({"data_parallel_address": "0.0.0.0"}, "--data-parallel-address: nobody can connect to 0.0.0.0"),
        ({"data_parallel_size": 1, "tensor_parallel_size": 2}, "--data-parallel-rank: 1 of a --data-parallel-size of"),
        ({"engine": "simulated", "profile": "h200-8b"}, "--data-parallel-size: a simulated node is alone"),
    ],
)
def test_what_data_parallel_nodes_need_is_named(changes, why):
    NodeSettings(model="none", **DATA_PARALLEL)
    with pytest.raises(ValueError, match=why):
        NodeSettings(model="none", **{**DATA_PARALLEL, **changes})


def test_stages_are_not_for_data_parallel_nodes():
    with pytest.raises(ValueError, match="--pipeline-parallel-size: not with --data-parallel-size so far"):
        PrefillSettings(model="none", pipeline_parallel_size=2, **DATA_PARALLEL)


HOSTS: dict[str, Any] = {"nnodes": 2, "tensor_parallel_size": 2, "pipeline_parallel_size": 3}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"nnodes": 1, "node_rank": 1}, "--node-rank: 1 of --nnodes 1"),
        ({"node_rank": 2}, "--node-rank: 2 of --nnodes 2"),
        ({"nnodes": 4}, "--nnodes: 6 ranks cannot be divided evenly among 4 hosts"),
        ({}, "--nnodes: stages of 2 ranks do not fit hosts of 3: one must be divisible by the other"),
        ({"nnodes": 3, "transport": "ipc"}, "--transport: ipc moves KV within one host, and --nnodes has more"),
        ({"nnodes": 3, "master_addr": "0.0.0.0"}, "--master-addr: nobody can connect to 0.0.0.0"),
        ({"pipeline_parallel_size": 1, **DATA_PARALLEL}, "--nnodes: not with --data-parallel-size so far"),
    ],
)
def test_what_several_hosts_need_is_named(changes, why):
    with pytest.raises(ValueError, match=why):
        PrefillSettings(model="none", **{**HOSTS, **changes})


def test_a_simulated_node_is_on_one_host():
    with pytest.raises(ValueError, match="--nnodes: a simulated node has one rank"):
        NodeSettings(model="none", nnodes=2, engine="simulated", profile="h200-8b")


@pytest.mark.parametrize(("nnodes", "ranks"), [(1, [[0, 1, 2, 3, 4, 5]]), (3, [[0, 1], [2, 3], [4, 5]])])
def test_hosts_have_consecutive_ranks(nnodes, ranks):
    hosts = [PrefillSettings(model="none", **{**HOSTS, "nnodes": nnodes}, node_rank=rank) for rank in range(nnodes)]
    assert [list(host.host_ranks) for host in hosts] == ranks


def test_hosts_agree_on_all_flags_but_their_own(tmp_path):
    """What may differ is of addresses, and of what rank 0 alone does."""
    sizes = {"model": "none", **HOSTS, "nnodes": 3}
    first = PrefillSettings(**sizes, listen="10.0.0.1:7000", node_id="first", cpu_threads=1, profile_dir=tmp_path)
    second = PrefillSettings(
        **{**sizes, "model": "/elsewhere"}, node_rank=1, transfer_interface="eth1", log_level="debug"
    )
    assert shared_flags(first) == shared_flags(second)
    for changes in ({"dtype": "bfloat16"}, {"block_size": 8}, {"transport": "nixl"}, {"max_num_seqs": 7}, {"seed": 1}):
        other = PrefillSettings(**sizes, node_rank=1, **changes)
        (name,) = changes
        flag = flag_name(name)
        differs = mismatch(shared_flags(other), shared_flags(first), "rank 0")
        assert differs == f"{flag}: {changes[name]}, and rank 0 has {getattr(first, name)}"
    decode = DecodeSettings(model="none", tensor_parallel_size=6, nnodes=3, node_rank=1)
    assert str(mismatch(shared_flags(decode), shared_flags(first), "rank 0")).startswith("the command: ")


@pytest.mark.parametrize("why", ["data parallel rank 0 has ended", None])
def test_a_start_that_the_loss_of_another_node_has_broken_names_it(checkpoint, monkeypatch, why):
    """Anything else that breaks it is told as it is."""

    class Peers:
        rendezvous = SimpleNamespace(store=None)

        def why_lost(self, timeout_s):
            return why

    def broken(*_):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr("node.build.join_nodes", lambda *_: Peers())
    monkeypatch.setattr("node.build.join_ranks", broken)
    with pytest.raises(StartupError if why else RuntimeError, match=why or "Connection closed"):
        build(settings(checkpoint, **DATA_PARALLEL))


def test_data_parallel_nodes_say_what_they_serve(checkpoint, monkeypatch):
    """The same, whether a default is stated or not."""
    said = []

    def join_nodes(_, serves, wake):
        said.append(serves)
        raise StartupError("alone")

    monkeypatch.setattr("node.build.join_nodes", join_nodes)
    dummy = {"load_format": "dummy"}
    stated = ({}, {"dtype": "float32", "max_model_len": 256}, {"seed": 7}, {"dtype": "bfloat16"})
    for fields in (*stated, dummy, dummy | {"seed": 7}):
        with pytest.raises(StartupError, match="alone"):
            build(settings(checkpoint, **DATA_PARALLEL, **fields))
    assert said[0] == said[1] == said[2] != said[3]
    assert said[4] == said[5], "dummy weights are the same whatever the seed"
    assert said[0]["the command"] != DecodeSettings.prog


@pytest.mark.parametrize(
    ("flag", "fields"),
    [
        ("--max-num-seqs", {"max_num_seqs": 8}),
        ("--max-num-batched-tokens", {"max_num_batched_tokens": 64}),
        ("--cudagraph-capture-sizes", {"cudagraph_capture_sizes": (1, 4)}),
        ("--target-itl", {"target_itl": 10.0}),
    ],
)
def test_on_gpus_data_parallel_nodes_say_what_graphs_depend_on(checkpoint, monkeypatch, flag, fields):
    """They replay the same ones. With --enforce-eager there are none."""
    said = []

    def join_nodes(_, serves, wake):
        said.append(serves)
        raise StartupError("alone")

    monkeypatch.setattr("node.build.join_nodes", join_nodes)
    for device in ("cpu", "cuda"):
        monkeypatch.setattr("node.build.device_of", lambda _, device=device: torch.device(device))
        for own in ({}, fields, {"enforce_eager": True}, {"enforce_eager": True, **fields}):
            with pytest.raises(StartupError, match="alone"):
                build(settings(checkpoint, **DATA_PARALLEL, **own))
    assert said[0] == said[1] == said[2] == said[3]
    captured, other, eager, other_eager = said[4:]
    assert {name for name in captured if captured[name] != other[name]} == {flag}
    assert eager == other_eager
    assert captured["--enforce-eager"] != eager["--enforce-eager"]


REFUSED = Tally(refused=[("layers.0.mlp.experts", "its sizes are no multiples of 16")])


@pytest.mark.parametrize(
    ("pieces", "taken_back", "why"),
    [
        ({"experts": REFUSED}, None, "layers.0.mlp.experts: its sizes are no multiples of 16"),
        ({"experts": Tally(fused=2)}, "logits differ by 9", "experts: logits differ by 9"),
        ({"experts": Tally(fused=2)}, None, None),
        ({"experts": Tally()}, "logits differ by 9", None),
        ({}, None, None),
    ],
)
def test_graphs_that_experts_do_not_allow_are_named_with_the_flag_that_helps(
    checkpoint, monkeypatch, pieces, taken_back, why
):
    """Other failures are told as they are."""
    built = build(settings(checkpoint))

    def failing(*_):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(built.runner, "capture", failing)
    built.runner.model.__dict__["baton_fused"] = FusedReport(pieces, taken_back)
    with pytest.raises(ValueError if why else RuntimeError) as raised:
        built._capture()
    said = f"--enforce-eager: needed, since steps cannot be CUDA graphs: {why} (" if why else ""
    assert str(raised.value).startswith(f"{said}operation not permitted")
