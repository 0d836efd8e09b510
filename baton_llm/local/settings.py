"""The settings of both nodes, from keyword arguments that are named like the flags of a node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.setting_names import closest
from baton.settings import SettingsError, flag_name, load
from decode_node.settings import DecodeSettings
from node.kv_events_config import KvEventsConfig
from node.settings import NodeSettings
from prefill_node.settings import PrefillSettings

_OF_PROCESSES: Mapping[str, Any] = {
    "advertise": None,
    "admin_key_file": None,
    "cluster_secret_file": None,
    "cluster_ssl_keyfile": None,
    "cluster_ssl_certfile": None,
    "cluster_ssl_ca_certs": None,
    "distributed_timeout_seconds": 300.0,
    "listen": "127.0.0.1:0",
    "master_addr": "127.0.0.1",
    "master_port": 29501,
    "metrics_port": None,
    "node_id": None,
    "transfer_interface": None,
    "transport": "ucx",
}
"""What concerns ports and peers, of which there are none: stated, so that an environment meant for nodes that are
processes does not matter."""
_OF_ONE_PROCESS: Mapping[str, Any] = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "data_parallel_rank": None,
    "nnodes": 1,
    "node_rank": 0,
}
_UNLESS_GIVEN: Mapping[str, Any] = {
    "enable_expert_parallel": False,
    "enable_eplb": False,
    "eplb_config": None,
    "kv_events_config": None,
}
"""What only goes with several ranks, or binds a port: stated for the same environment."""
_OTHERS = ("config", "drain_timeout", "log_format", "log_level")
NAMES = frozenset(NodeSettings.model_fields) - _OF_PROCESSES.keys() - {*_OTHERS}
"""The flags of a node that also mean something here."""


def make_settings(flags: Mapping[str, Any]) -> tuple[PrefillSettings, DecodeSettings]:
    """Raises TypeError for a name that is no such flag, ValueError for a bad value."""
    for name in flags:
        if name not in NAMES:
            meant = closest(name, NAMES)
            hint = f", did you mean {meant!r}?" if meant else ""
            raise TypeError(f"{name!r} is no flag of a node that can be set here{hint}")
    given = {**_OF_PROCESSES, **_OF_ONE_PROCESS, **_UNLESS_GIVEN, **flags}
    try:
        first = load(PrefillSettings, given)
        _require_one_rank(first)
        if first.kv_events_config is not None:
            given["kv_events_config"] = KvEventsConfig.parse(first.kv_events_config).of_node(1).model_dump_json()
        both = first, load(DecodeSettings, given)
    except SettingsError as error:
        raise ValueError(str(error)) from None
    # `memory` is no choice of --transport: it connects nodes of one process
    prefill, decode = (settings.model_copy(update={"transport": "memory"}) for settings in both)
    return prefill, decode  # type: ignore[return-value]


def _require_one_rank(settings: NodeSettings) -> None:
    for name in _OF_ONE_PROCESS:
        if (getattr(settings, name) or 1) > 1:
            raise ValueError(
                f"{flag_name(name)}: ranks are processes, and the nodes of an LLM are in this one; start a cluster "
                "with baton up and give its router: LLM(router=...)"
            )
