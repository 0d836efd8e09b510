"""What a node says of its model, where flags come before the files of the checkpoint."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from baton.node_info import GenerationDefaults, NodeInfo, NodeRole
from baton.settings import parse
from decode_node.settings import DecodeSettings
from engine.simulated.profile import load_profile
from node.describe import describe
from node.settings import NodeSettings
from node.simulated import simulate

COMMAND = ("--model", "baton-tiny", "--engine", "simulated", "--profile", "h200-8b")


def described(*flags: str) -> NodeInfo:
    settings = parse(NodeSettings, (*COMMAND, *flags))
    built = simulate(settings, load_profile("h200-8b"), time.monotonic, lambda at: None)
    return describe(settings, NodeRole.DECODE, built, "i1", [])


def test_a_file_may_be_the_chat_template(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[0].content }} ü", encoding="utf-8")
    assert described("--chat-template", str(file)).chat_template == "{{ messages[0].content }} ü"
    assert "messages" in described().chat_template


def test_defaults_of_requests_may_be_others_than_the_checkpoints() -> None:
    own = described().generation_defaults
    other = described("--override-generation-config", '{"temperature": 0.5, "top_k": -1, "max_new_tokens": 9}')
    defaults = other.generation_defaults
    assert (defaults.temperature, defaults.top_k, defaults.max_new_tokens) == (0.5, None, 9)
    assert (defaults.eos_token_ids, defaults.top_p) == (own.eos_token_ids, own.top_p)


def test_the_checkpoints_defaults_may_be_left_out_but_for_the_ends() -> None:
    given = ("--generation-config", "vllm", "--override-generation-config", '{"top_p": 0.5}')
    stated = GenerationDefaults((2,), temperature=0.6, top_k=20)
    settings = parse(NodeSettings, (*COMMAND, *given))
    assert settings.generation_defaults(stated) == GenerationDefaults((2,), top_p=0.5)
    assert parse(NodeSettings, COMMAND).generation_defaults(stated) == stated


@pytest.mark.parametrize("given", [("a", "b", "c"), ("a,b", "c"), ("a, b,c",)])
def test_a_model_may_have_several_names(given: tuple[str, ...]) -> None:
    info = described("--served-model-name", *given)
    assert (info.served_model_name, info.model_aliases) == ("a", ("b", "c"))
    assert (described().served_model_name, described().model_aliases) == ("baton-tiny", ())


@pytest.mark.parametrize(("flag", "told"), [((), 20), (("50",), 50), (("0",), 0), (("-1",), 4096), (("5000",), 5000)])
def test_a_node_says_how_many_logprobs_it_tells(flag: tuple[str, ...], told: int) -> None:
    assert described(*(f"--max-logprobs={value}" for value in flag)).max_logprobs == told


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ('{"temperature": -1}', "temperature must be in [0, 1e6], 0 being greedy, not -1"),
        ('{"top_q": 1}', "there is no 'top_q', only max_new_tokens, min_p, repetition_penalty, temperature, top_k"),
        ("[]", "must be a JSON object"),
        ("{", "must be JSON"),
    ],
)
def test_defaults_with_which_no_request_could_run(given: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(DecodeSettings, (*COMMAND, "--override-generation-config", given))
    told = capsys.readouterr().err
    assert f"--override-generation-config: {says}" in told
    assert told.count("\n") == 1
