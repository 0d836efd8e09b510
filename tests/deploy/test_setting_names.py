"""The list of all settings' names is that of the settings, and commands pass over what is another's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from baton.address import HostPort
from baton.setting_names import ALL_NAMES
from baton.settings import Settings, parse
from baton.vllm_flags import VLLM_FLAGS
from decode_node.settings import DecodeSettings
from deploy.bench.settings import BenchSettings
from deploy.doctor.settings import DoctorSettings
from deploy.settings import UpSettings
from deploy.top.settings import TopSettings
from deploy.tune.settings import TuneSettings
from prefill_node.settings import PrefillSettings
from router.settings import RouterSettings

COMMANDS: tuple[type[Settings], ...] = (
    *(RouterSettings, PrefillSettings, DecodeSettings, UpSettings),
    *(BenchSettings, DoctorSettings, TopSettings, TuneSettings),
)


def test_the_list_has_every_commands_settings_and_no_other() -> None:
    assert set().union(*(command.model_fields for command in COMMANDS)) == ALL_NAMES


def test_flags_of_vllm_are_none_of_ours_and_what_is_said_of_them_exists() -> None:
    assert not VLLM_FLAGS.keys() & ALL_NAMES
    named = {name for text in VLLM_FLAGS.values() for name in re.findall(r"--(?:no-)?([a-z-]+)", text)}
    assert {name.replace("-", "_") for name in named} <= ALL_NAMES


def test_one_file_starts_every_role(tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("model: baton-tiny\ndecode: ['127.0.0.1:9002']\nrequest-timeout: 60\nmax-num-seqs: 4\n")
    router = parse(RouterSettings, ["--config", str(file)])
    decode = parse(DecodeSettings, ["--config", str(file)])
    assert router.decode == (HostPort("127.0.0.1", 9002),)
    assert (decode.model, decode.max_num_seqs) == ("baton-tiny", 4)
    assert router.request_timeout == decode.request_timeout == 60


def test_two_listeners_of_one_port_are_told(tmp_path: Path) -> None:
    here = HostPort("127.0.0.1", 9000)
    with pytest.raises(ValueError, match="--http, --grpc: both are"):
        RouterSettings(decode=(HostPort("a", 1),), http=here, grpc=here)
    with pytest.raises(ValueError, match="--metrics-port: 9000 is the port of --listen"):
        DecodeSettings(model="m", listen=here, metrics_port=9000)
