"""`--enable-eplb` and `--eplb-config`: vLLM's form, and what is refused by the flag."""

from __future__ import annotations

import re
from typing import Any

import pytest

from node.settings import NodeSettings

DIVIDED: dict[str, Any] = {"model": "none", "tensor_parallel_size": 2, "enable_expert_parallel": True}


def test_the_defaults_are_those_of_vllm() -> None:
    assert NodeSettings(**DIVIDED).eplb is None
    found = NodeSettings(**DIVIDED, enable_eplb=True).eplb
    assert found is not None
    counts = {"window_size": 1000, "step_interval": 3000, "num_redundant_experts": 0, "log_balancedness_interval": 1}
    ways = {"log_balancedness": False, "use_async": False, "policy": "default", "communicator": None}
    assert found.model_dump() == counts | ways
    assert found.log_every == 0


def test_what_is_stated_counts() -> None:
    stated = '{"window_size": 10, "num_redundant_experts": 2, "log_balancedness": true, "log_balancedness_interval": 7}'
    found = NodeSettings(**DIVIDED, enable_eplb=True, eplb_config=stated).eplb
    assert found is not None
    assert found.log_every == 7
    assert (found.window_size, found.step_interval, found.num_redundant_experts) == (10, 3000, 2)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"enable_eplb": False, "eplb_config": "{}"}, "--eplb-config: only goes with --enable-eplb"),
        ({"enable_expert_parallel": False}, "--enable-eplb: moves whole experts, which needs --enable-expert-parallel"),
        ({"pipeline_parallel_size": 2}, "--enable-eplb: rank 0 must have all layers"),
        ({"load_format": "dummy"}, "--enable-eplb: copies of an expert must be equal, which --load-format dummy"),
        ({"tensor_parallel_size": 1}, "--enable-expert-parallel: divides experts among ranks, and --tensor-parallel"),
        ({"eplb_config": '{"window_size": 0}'}, "--eplb-config: window_size: Input should be greater than"),
        ({"eplb_config": '{"step_interval": 0}'}, "--eplb-config: step_interval: Input should be greater than"),
        ({"eplb_config": '{"num_redundant_experts": -1}'}, "--eplb-config: num_redundant_experts: Input should be"),
        ({"eplb_config": '{"policy": "greedy"}'}, "--eplb-config: policy: Input should be 'default'"),
        ({"eplb_config": '{"communicator": "nixl"}'}, "--eplb-config: communicator: Input should be null"),
        ({"eplb_config": '{"windows": 3}'}, "--eplb-config: windows: Extra inputs are not permitted"),
        ({"eplb_config": "2 slots"}, "--eplb-config: Invalid JSON"),
    ],
)
def test_what_cannot_be_is_named_by_the_flag(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        NodeSettings(**{**DIVIDED, "enable_eplb": True, **changes})
