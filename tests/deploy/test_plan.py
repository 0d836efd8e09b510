"""Which processes a cluster is made of, and what each is told."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from baton.address import HostPort
from baton.settings import parse
from deploy import plan as deploy_plan
from deploy.plan import Child, Machine, NodePorts, clean_environment, node_names, placement, plan, this_machine
from deploy.settings import OwnSettings, UpSettings
from node.kv_events_config import KvEventsConfig
from node.settings import GIB, NodeSettings
from router.settings import RouterSettings
from tests.deploy.spawned import ROOT, python_path

HTTP, GRPC = HostPort("127.0.0.1", 8000), HostPort("127.0.0.1", 8001)


def settings(*flags: str) -> OwnSettings:
    return parse(UpSettings, flags)


def planned(machine: Machine, *flags: str) -> dict[str, Child]:
    up = settings(*flags)
    ports = {
        name: NodePorts(*(HostPort("127.0.0.1", port + i) for port in (9000, 9100, 9200)))
        for i, name in enumerate(node_names(up))
    }
    return {child.name: child for child in plan(up, machine, HTTP, GRPC, ports)}


def test_smallest_cluster() -> None:
    children = planned(Machine(2, ()))
    assert list(children) == ["router", "prefill-0", "decode-0"]
    assert [child.module for child in children.values()] == ["router.main", "prefill_node.main", "decode_node.main"]
    router = parse(RouterSettings, children["router"].arguments)
    assert router.prefill == (HostPort("127.0.0.1", 9000),)
    assert router.decode == (HostPort("127.0.0.1", 9001),)
    assert (router.http, router.grpc) == (HTTP, GRPC)
    node = parse(NodeSettings, children["decode-0"].arguments)
    assert (node.model, node.listen, node.metrics_port) == ("baton-tiny", HostPort("127.0.0.1", 9001), 9101)


def test_nodes_share_the_cores() -> None:
    children = planned(Machine(16, ()), "--prefill=2", "--decode=3")
    assert [name for name in children if name != "router"] == [
        *(f"prefill-{i}" for i in (0, 1)),
        *(f"decode-{i}" for i in range(3)),
    ]
    nodes = [child for name, child in children.items() if name != "router"]
    assert {parse(NodeSettings, node.arguments).cpu_threads for node in nodes} == {3}
    assert {node.env["OMP_NUM_THREADS"] for node in nodes} == {"3"}
    assert parse(NodeSettings, planned(Machine(1, ()))["prefill-0"].arguments).cpu_threads == 1
    assert parse(NodeSettings, planned(Machine(1, ()), "--cpu-threads=5")["prefill-0"].arguments).cpu_threads == 5


def test_nodes_on_a_cpu_take_half_of_the_memory_together() -> None:
    flags = ("--prefill=1", "--decode=3", "--prefill-tensor-parallel-size=2")
    nodes = [child for name, child in planned(Machine(8, (), 5 * GIB), *flags).items() if name != "router"]
    assert [parse(NodeSettings, node.arguments).kv_cache_memory_bytes for node in nodes] == [GIB // 2] * 4
    for more, memory in (("--max-num-seqs=8", 10 * GIB), ("--kv-cache-memory-bytes=77M", GIB)):
        node = planned(Machine(8, (), memory), *flags, more)["decode-0"]
        stated = parse(NodeSettings, node.arguments).kv_cache_memory_bytes
        assert stated == (77 << 20 if "bytes" in more else None)
    on_gpu = planned(Machine(8, ("0",), GIB), "--decode=3")["decode-0"]
    assert not any("kv-cache" in argument for argument in on_gpu.arguments)


def test_each_pool_has_its_number_of_ranks_and_they_share_the_cores() -> None:
    flags = ("--tensor-parallel-size=2", "--decode-tensor-parallel-size=4", "--prefill=2")
    children = planned(Machine(16, ()), *flags)
    nodes = {name: parse(NodeSettings, child.arguments) for name, child in children.items() if name != "router"}
    assert {name: node.tensor_parallel_size for name, node in nodes.items()} == {
        "prefill-0": 2,
        "prefill-1": 2,
        "decode-0": 4,
    }
    assert {node.cpu_threads for node in nodes.values()} == {2}
    said = "prefill-0 2 ranks, prefill-1 2 ranks, decode-0 4 ranks; 8 ranks on 16 cores, threads of each: 2"
    assert placement(settings(*flags), Machine(16, ())) == said
    assert placement(settings("--prefill=2"), Machine(16, ())) is None


def test_experts_are_divided_on_nodes_that_have_ranks() -> None:
    flags = ("--decode-tensor-parallel-size=2", "--enable-expert-parallel")
    children = planned(Machine(4, ()), *flags)
    nodes = {name: parse(NodeSettings, child.arguments) for name, child in children.items() if name != "router"}
    assert {name: node.enable_expert_parallel for name, node in nodes.items()} == {"prefill-0": False, "decode-0": True}


def test_experts_change_places_on_nodes_that_have_ranks() -> None:
    config = '{"num_redundant_experts": 4}'
    flags = ("--decode-tensor-parallel-size=2", "--enable-expert-parallel", "--enable-eplb")
    for stated, number in (((), 0), ((f"--eplb-config={config}",), 4)):
        children = planned(Machine(4, ()), *flags, *stated)
        prefill, decode = (parse(NodeSettings, children[name].arguments) for name in ("prefill-0", "decode-0"))
        assert prefill.eplb is None
        assert decode.eplb is not None
        assert decode.eplb.num_redundant_experts == number
        assert placement(settings(*flags, *stated), Machine(4, ())) is not None


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--eplb-config={}", "--enable-expert-parallel"), "--eplb-config: only goes with --enable-eplb"),
        (("--enable-eplb",), "--enable-eplb: moves whole experts, which needs --enable-expert-parallel"),
        (
            ("--enable-eplb", "--enable-expert-parallel", "--prefill-pipeline-parallel-size=2"),
            "--enable-eplb: not with stages, of --prefill-pipeline-parallel-size",
        ),
    ],
)
def test_experts_that_cannot_change_places_are_refused_by_the_flag(flags: tuple[str, ...], why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        placement(settings("--tensor-parallel-size=2", *flags), Machine(8, ("0", "1")))


@pytest.mark.parametrize("what", ["tensor", "pipeline", "data"])
def test_ranks_of_prefill_nodes_need_prefill_nodes(what: str) -> None:
    flags = "--prefill=0", f"--prefill-{what}-parallel-size=2"
    with pytest.raises(ValueError, match=f"--prefill-{what}-parallel-size: there are no prefill nodes"):
        placement(settings(*flags), Machine(8, ()))


def test_prefill_nodes_alone_have_stages() -> None:
    flags = ("--tensor-parallel-size=2", "--prefill-pipeline-parallel-size=3")
    children = planned(Machine(16, ()), *flags)
    prefill, decode = (parse(NodeSettings, children[name].arguments) for name in ("prefill-0", "decode-0"))
    assert (prefill.tensor_parallel_size, prefill.pipeline_parallel_size) == (2, 3)
    assert (decode.tensor_parallel_size, decode.pipeline_parallel_size) == (2, 1)
    said = "prefill-0 6 ranks in 3 stages, decode-0 2 ranks; 8 ranks on 16 cores, threads of each: 2"
    assert placement(settings(*flags), Machine(16, ())) == said


@pytest.mark.parametrize(
    ("machine", "flags", "why"),
    [
        (
            Machine(4, ()),
            ("--tensor-parallel-size=8",),
            "--tensor-parallel-size: prefill-0 would have 8 ranks on 4 cores",
        ),
        (
            *(Machine(4, ()), ("--tensor-parallel-size=2", "--decode-tensor-parallel-size=5")),
            "--decode-tensor-parallel-size: decode-0 would have 5 ranks on 4 cores",
        ),
        (
            *(Machine(4, ()), ("--prefill-tensor-parallel-size=2", "--prefill-pipeline-parallel-size=3")),
            "--prefill-pipeline-parallel-size: prefill-0 would have 6 ranks on 4 cores",
        ),
        (
            *(Machine(4, ("0",)), ("--prefill-tensor-parallel-size=2",)),
            "--prefill-tensor-parallel-size: prefill-0 would have 2 ranks, each with a GPU of its own, and there are 1",
        ),
        (
            *(Machine(4, ("0", "1")), ("--prefill-pipeline-parallel-size=3",)),
            "--prefill-pipeline-parallel-size: prefill-0 would have 3 ranks, each with a GPU of its own, and there are",
        ),
    ],
)
def test_ranks_without_a_place_are_refused_by_the_flag(machine: Machine, flags: tuple[str, ...], why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        placement(settings(*flags), machine)
    assert placement(settings(*flags, "--device=cpu"), Machine(8, machine.gpus))


def test_data_parallel_nodes_meet_at_the_port_of_their_first_one() -> None:
    flags = ("--decode=2", "--decode-data-parallel-size=2", "--enable-expert-parallel")
    children = planned(Machine(8, ()), *flags)
    nodes = {name: parse(NodeSettings, child.arguments) for name, child in children.items() if name != "router"}
    assert list(nodes) == ["prefill-0", "decode-0", "decode-1", "decode-2", "decode-3"]
    assert [node.data_parallel_rank for node in nodes.values()] == [None, 0, 1, 0, 1]
    assert [node.data_parallel_size for node in nodes.values()] == [1, 2, 2, 2, 2]
    ports = [node.data_parallel_rpc_port for node in nodes.values()][1:]
    assert ports[0] == ports[1] != ports[2] == ports[3]
    assert {name: node.enable_expert_parallel for name, node in nodes.items()}["prefill-0"] is False
    assert placement(settings(*flags), Machine(8, ())) == (
        "prefill-0 1 rank, "
        + ", ".join(f"decode-{i} 1 rank with experts shared with 1 more" for i in range(4))
        + "; 5 ranks on 8 cores, threads of each: 1"
    )
    with pytest.raises(
        ValueError, match=r"^--decode-data-parallel-size: decode-0 and its peers would have 2 ranks on 1"
    ):
        placement(settings(*flags), Machine(1, ()))
    shared = settings("--decode-data-parallel-size=2", "--enable-expert-parallel")
    assert placement(shared, Machine(8, ("0", "1", "2"))) == (
        "prefill-0 on GPU 0, decode-0 on GPU 1 with experts shared with 1 more, "
        "decode-1 on GPU 2 with experts shared with 1 more; a rank on each"
    )
    with pytest.raises(
        ValueError, match=r"^--decode-data-parallel-size: decode-0 and its peers would have 2 ranks, ea"
    ):
        placement(shared, Machine(8, ("0",)))


def test_experts_are_not_divided_where_no_node_has_ranks() -> None:
    with pytest.raises(ValueError, match="--enable-expert-parallel: divides experts among ranks, and no stage has"):
        placement(settings("--enable-expert-parallel", "--prefill-pipeline-parallel-size=2"), Machine(4, ()))


def test_decode_nodes_may_be_alone() -> None:
    children = planned(Machine(4, ()), "--prefill=0", "--decode=2")
    assert sorted(children) == ["decode-0", "decode-1", "router"]
    assert parse(RouterSettings, children["router"].arguments).prefill == ()


def test_each_node_has_a_gpu_of_its_own_first_and_shares_its_memory() -> None:
    children = planned(Machine(8, ("4", "6")), "--prefill=1", "--decode=2", "--gpu-memory-utilization=0.8")
    nodes = [children[name] for name in ("prefill-0", "decode-0", "decode-1")]
    assert [node.env["CUDA_VISIBLE_DEVICES"] for node in nodes] == ["4,6", "6,4", "4,6"]
    shares = [parse(NodeSettings, node.arguments).gpu_memory_utilization for node in nodes]
    assert shares == [0.4, 0.8, 0.4]


def test_each_rank_has_a_gpu_of_its_own() -> None:
    flags = ("--decode-tensor-parallel-size=2", "--gpu-memory-utilization=0.8")
    four = Machine(8, ("0", "1", "2", "3"))
    assert placement(settings(*flags), four) == "prefill-0 on GPU 0, decode-0 on GPU 1 and 2; a rank on each"
    staged = placement(settings("--prefill-pipeline-parallel-size=2"), four)
    assert staged == "prefill-0 on GPU 0 and 1, decode-0 on GPU 2; a rank on each"
    seen = {name: child.env["CUDA_VISIBLE_DEVICES"] for name, child in planned(four, *flags).items() if "-" in name}
    assert seen == {"prefill-0": "0,1,2,3", "decode-0": "1,2,0,3"}
    pairs = planned(four, *flags, "--prefill-tensor-parallel-size=2")
    assert pairs["decode-0"].env["CUDA_VISIBLE_DEVICES"] == "2,3,0,1"
    three = planned(Machine(8, ("0", "1", "2")), *flags, "--decode=2")  # decode-0 shares GPU 1, and has 2 alone
    assert parse(NodeSettings, three["decode-0"].arguments).gpu_memory_utilization == 0.4
    two = planned(Machine(8, ("0", "1")), *flags, "--prefill-tensor-parallel-size=2")
    shares = [parse(NodeSettings, two[name].arguments).gpu_memory_utilization for name in ("prefill-0", "decode-0")]
    assert shares == [0.4, 0.4]


def test_gpus_are_left_alone_on_request() -> None:
    node = planned(Machine(8, ("0",)), "--device=cpu")["prefill-0"]
    assert "CUDA_VISIBLE_DEVICES" not in node.env
    assert parse(NodeSettings, node.arguments).device == "cpu"


def test_settings_are_handed_on_however_they_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "up.yaml"
    file.write_text("max-num-seqs: 7\nprefill: 2\n")
    monkeypatch.setenv("BATON_BLOCK_SIZE", "32")
    flags = ("--request-timeout=9", "--max-num-requests=5", "--log-level=debug", "--first-token=decode")
    lists_and_switches = (
        "--cudagraph-capture-sizes=1,2",
        "--no-async-scheduling",
        '--override-generation-config={"top_p": 0.5}',
    )
    children = planned(Machine(2, ()), f"--config={file}", *flags, *lists_and_switches)
    assert "prefill-1" in children
    node = parse(NodeSettings, children["prefill-1"].arguments)
    assert (node.cudagraph_capture_sizes, node.async_scheduling) == ((1, 2), False)
    assert node.override_generation_config == {"top_p": 0.5}
    assert (node.max_num_seqs, node.block_size, node.request_timeout, node.log_level) == (7, 32, 9.0, "debug")
    router = parse(RouterSettings, children["router"].arguments)
    assert (router.max_num_requests, router.request_timeout, router.log_level) == (5, 9.0, "debug")
    assert router.first_token == "decode"


def test_what_was_not_set_is_left_to_the_process() -> None:
    names = {argument.split("=")[0] for argument in planned(Machine(2, ()))["decode-0"].arguments}
    assert names == {"--model", "--node-id", "--listen", "--metrics-port", "--cpu-threads"}


def test_every_setting_of_node_and_router_can_be_given() -> None:
    own = {"config", "listen", "advertise", "metrics_port", "node_id"}
    own |= {"ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs"}
    own |= {"data_parallel_rank", "data_parallel_address", "data_parallel_rpc_port"}
    own |= {"nnodes", "node_rank", "master_addr", "master_port"}  # baton-up's nodes are on this machine
    own |= {"distributed_timeout_seconds"}
    own |= {"pipeline_parallel_size"}  # of prefill nodes only: --prefill-pipeline-parallel-size
    assert (
        NodeSettings.model_fields.keys() | RouterSettings.model_fields.keys()
    ) - own <= UpSettings.model_fields.keys()


def events_of(children: dict[str, Child]) -> list[tuple[str, str | None]]:
    nodes = [parse(NodeSettings, child.arguments) for name, child in children.items() if name != "router"]
    found = [KvEventsConfig.parse(node.kv_events_config or "") for node in nodes]
    assert all(config.publishes for config in found)
    return [(config.endpoint, config.replay_endpoint) for config in found]


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({}, [("tcp://*:5557", None), ("tcp://*:5558", None), ("tcp://*:5559", None)]),
        (
            {"endpoint": "tcp://*:6000", "replay_endpoint": "tcp://127.0.0.1:7000"},
            [(f"tcp://*:{6000 + i}", f"tcp://127.0.0.1:{7000 + i}") for i in range(3)],
        ),
        ({"endpoint": "tcp://indexer:6000"}, [("tcp://indexer:6000", None)] * 3),
        ({"endpoint": "tcp://127.0.0.1:*"}, [("tcp://127.0.0.1:*", None)] * 3),
        ({"endpoint": "ipc:///tmp/kv"}, [(f"ipc:///tmp/kv{end}", None) for end in ("", "-1", "-2")]),
    ],
)
def test_each_node_publishes_kv_events_at_an_endpoint_of_its_own(
    stated: dict[str, str], expected: list[tuple[str, str | None]]
) -> None:
    text = json.dumps({"enable_kv_cache_events": True, **stated})
    assert events_of(planned(Machine(2, ()), "--decode=2", f"--kv-events-config={text}")) == expected


def test_a_node_refuses_kv_events_that_are_no_configuration() -> None:
    children = planned(Machine(2, ()), "--kv-events-config={")
    assert "--kv-events-config={" in children["decode-0"].arguments


def test_keys_are_on_no_command_line() -> None:
    keys = ("--api-key", "sk-one", "--api-key", "sk-two", "--admin-api-key", "sk-admin")
    router = planned(Machine(2, ()), *keys)["router"]
    assert not any("api" in argument or "sk-" in argument for argument in router.arguments)
    assert router.env == {"BATON_API_KEY": "sk-one sk-two", "BATON_ADMIN_API_KEY": "sk-admin"}


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        ("0,1", ("0", "1")),
        (" 3 , GPU-8932f937,MIG-GPU-1/2/3", ("3", "GPU-8932f937", "MIG-GPU-1/2/3")),
        ("1,-1,0", ("1",)),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("", ()),
    ],
)
def test_gpus_are_those_that_cuda_would_show(visible: str, gpus: tuple[str, ...], monkeypatch) -> None:
    """-1 hides them all: a cluster on the CPU's cores would be refused for the one GPU that it seemed to be."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert this_machine().gpus == gpus


def test_the_cores_are_those_that_a_container_s_quota_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy_plan, "num_cpus", lambda: 3)
    assert this_machine().num_cores == 3


def test_children_do_not_see_our_settings() -> None:
    """In lower case, too, in which they are read as well."""
    assert clean_environment({"BATON_MODEL": "m", "baton_config": "f", "HOME": "/"}) == {"HOME": "/"}


def test_baton_up_itself_needs_no_torch() -> None:
    program = "import sys; sys.modules['torch'] = None; import deploy.up"
    subprocess.run([sys.executable, "-c", program], env=python_path(), cwd=ROOT, check=True, timeout=60)
