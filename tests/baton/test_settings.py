"""One name three ways, precedence, and one-line errors."""

import subprocess
import sys
from typing import ClassVar, Literal

import pytest
from pydantic import Field, model_validator

from baton.address import HostPort
from baton.settings import (
    ConnectAddress,
    ConnectAddresses,
    JsonObject,
    LargeNumber,
    ListenAddress,
    Settings,
    Sizes,
    misspelt_variables,
    parse,
)


class Example(Settings):
    """A command for tests."""

    prog: ClassVar[str] = "baton-example"

    max_num_seqs: int = Field(8, gt=0, description="requests in one step")
    share: float | None = Field(None, gt=0, le=1, description="share of memory, 100% is 1")
    listen: ListenAddress = Field(HostPort("127.0.0.1", 0), description="address to serve on")
    peer: ConnectAddress | None = Field(None, description="address of the peer")
    nodes: ConnectAddresses = Field((), description="addresses of the nodes")
    mode: Literal["auto", "cpu"] = Field("auto", description="where to run")
    fast: bool = Field(False, description="take the fast way")
    ahead: bool | None = Field(None, description="run ahead; unset: where it helps")
    sizes: Sizes = Field((), description="batch sizes")
    size: LargeNumber = Field(None, ge=2, description="bytes")
    values: JsonObject = Field({}, description="values by name")
    low: int = Field(0, description="lower end")
    high: int = Field(9, description="upper end")

    @model_validator(mode="after")
    def _ordered(self) -> "Example":
        if self.low > self.high:
            raise ValueError(f"--low {self.low} is above --high {self.high}")
        return self


@pytest.fixture
def config(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "baton.yaml"
        path.write_text(text)
        return str(path)

    return write


def fails(capsys, *argv: str) -> str:
    """The one line that a bad start writes."""
    with pytest.raises(SystemExit) as exit_:
        parse(Example, list(argv))
    assert exit_.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("baton-example: ")
    return err


def test_defaults():
    settings = parse(Example, [])
    assert (settings.max_num_seqs, settings.share, settings.listen) == (8, None, HostPort("127.0.0.1", 0))


def test_flag_beats_environment_beats_file_beats_default(config, monkeypatch):
    path = config("max-num-seqs: 3\nshare: 0.5\nhigh: 20\n")
    monkeypatch.setenv("BATON_MAX_NUM_SEQS", "5")
    monkeypatch.setenv("BATON_SHARE", "0.25")
    settings = parse(Example, ["--config", path, "--max-num-seqs", "7"])
    assert (settings.max_num_seqs, settings.share, settings.high, settings.low) == (7, 0.25, 20, 0)


def test_a_variable_in_lower_case_beats_the_file_too(config, monkeypatch):
    monkeypatch.setenv("baton_config", config("max-num-seqs: 3\nhigh: 20\n"))
    monkeypatch.setenv("baton_max_num_seqs", "5")
    settings = parse(Example, [])
    assert (settings.max_num_seqs, settings.high) == (5, 20)


def test_the_file_may_be_named_by_the_environment_and_spell_keys_with_underscores(config, monkeypatch):
    monkeypatch.setenv("BATON_CONFIG", config("max_num_seqs: 3\nnodes: ['a:1', 'b:2']\n"))
    settings = parse(Example, [])
    assert settings.max_num_seqs == 3
    assert settings.nodes == (HostPort("a", 1), HostPort("b", 2))


def test_an_empty_variable_is_none_at_all(config, monkeypatch):
    monkeypatch.setenv("BATON_MAX_NUM_SEQS", "")
    assert parse(Example, ["--config", config("max-num-seqs: 3")]).max_num_seqs == 3


def test_address_lists(monkeypatch):
    expected = (HostPort("a", 1), HostPort("::1", 2))
    assert parse(Example, ["--nodes", "a:1, [::1]:2"]).nodes == expected
    assert parse(Example, ["--nodes", "a:1", "--nodes", "[::1]:2"]).nodes == expected
    monkeypatch.setenv("BATON_NODES", "a:1,[::1]:2")
    assert parse(Example, []).nodes == expected


def test_switches(monkeypatch):
    assert parse(Example, ["--fast"]).fast
    monkeypatch.setenv("BATON_FAST", "true")
    assert parse(Example, []).fast
    assert not parse(Example, ["--no-fast"]).fast


def test_switches_that_may_be_left_open(monkeypatch):
    assert [parse(Example, argv).ahead for argv in ([], ["--ahead"], ["--no-ahead"])] == [None, True, False]
    monkeypatch.setenv("BATON_AHEAD", "false")
    assert parse(Example, []).ahead is False


def test_size_lists(config, monkeypatch):
    assert parse(Example, []).sizes == ()
    for argv in (["--sizes", "1,2", "--sizes", "8"], ["--sizes", "1", "2", "8"], ["--sizes", "1", "2,8", "--fast"]):
        assert parse(Example, argv).sizes == (1, 2, 8)
    assert parse(Example, ["--config", config("sizes: [1, 2]")]).sizes == (1, 2)
    monkeypatch.setenv("BATON_SIZES", "4,16")
    assert parse(Example, []).sizes == (4, 16)


def test_objects(config, capsys):
    assert parse(Example, []).values == {}
    assert parse(Example, ["--values", '{"a": [1]}']).values == {"a": [1]}
    assert parse(Example, ["--config", config("values: {a: [1]}")]).values == {"a": [1]}
    assert parse(Example, ["--config", config("values: '{\"a\": [1]}'")]).values == {"a": [1]}
    for text, why in (("{", "must be JSON"), ("3", "must be a JSON object")):
        with pytest.raises(SystemExit):
            parse(Example, ["--values", text])
        assert f"--values: {why}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "number"),
    [("16384", 16384), ("16k", 16_000), ("16K", 16_384), ("25.6k", 25_600), ("4G", 4 << 30), ("1T", 1 << 40)],
)
def test_large_numbers_are_written_as_vllm_takes_them(config, text, number):
    assert parse(Example, ["--size", text]).size == number
    assert parse(Example, ["--config", config(f"size: {text}")]).size == number


def test_frozen():
    with pytest.raises(ValueError, match="frozen"):
        setattr(parse(Example, []), "fast", True)  # noqa: B010 - mypy knows that it cannot be


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--max-num-seqs", "0"], "--max-num-seqs: Input should be greater than 0, not '0'"),
        (["--max-num-seqs", "many"], "--max-num-seqs: "),
        (["--mode", "gpu"], "--mode: Input should be 'auto' or 'cpu', not 'gpu'"),
        (["--listen", "8000"], "--listen: must be HOST:PORT, not '8000'"),
        (["--listen", "::1:80"], "--listen: an IPv6 address needs brackets"),
        (["--listen", "a:70000"], "--listen: the port must be a number up to 65535"),
        (["--peer", "a:0"], "--peer: port 0 is no port to connect to"),
        (["--nodes", "a:1,b"], "--nodes: must be HOST:PORT, not 'b'"),
        (["--sizes", "1,0"], "--sizes: Input should be greater than 0, not '0'"),
        (["--size", "1"], "--size: Input should be greater than or equal to 2, not '1'"),
        (["--size", "0.001k"], "--size: Input should be greater than or equal to 2, not 1"),
        (["--size", "1.5K"], "--size: K is a power of 1024 and takes no fraction, k is one of 1000 and does"),
        (["--size", "4GB"], "--size: Input should be a valid integer"),
        (["--low", "10"], "--low 10 is above --high 9"),
        (["--max-seqs", "3"], "unrecognized arguments: --max-seqs 3, did you mean --max-num-seqs?"),
        (["--max-seqs=3"], "unrecognized arguments: --max-seqs=3, did you mean --max-num-seqs?"),
        (["--prefill-dns", "a:1"], "unrecognized arguments: --prefill-dns a:1, which other commands take"),
        (["--max-num", "3"], "unrecognized arguments: --max-num"),
        (["--enable-lora"], "unrecognized arguments: --enable-lora; there are no LoRA adapters"),
        (["--config", "/nowhere.yaml"], "--config: cannot read /nowhere.yaml"),
    ],
)
def test_bad_flags_end_with_one_line(capsys, argv, text):
    assert text in fails(capsys, *argv)


def test_a_bad_variable_is_named(capsys, monkeypatch):
    monkeypatch.setenv("BATON_MAX_NUM_SEQS", "x")
    assert "--max-num-seqs (from BATON_MAX_NUM_SEQS): " in fails(capsys)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-num-seqs: x", "--max-num-seqs (from "),
        ("max-seqs: 3", "has an unknown key 'max-seqs'"),
        ("low: 1\nconfig: other.yaml", "has an unknown key 'config'"),
        ("max-num-seqs: 1\nmax_num_seqs: 2", "sets 'max_num_seqs' twice"),
        ("max-num-seqs: 1\nlow: 2\nmax-num-seqs: 2", "'max-num-seqs' is there twice"),
        (r'config-file: "a\0b"', "is not YAML: a text has a zero character"),
        ("low: 3 #" + "x" * (1 << 20), "is larger than 1048576 bytes"),
        ("low: 2026-13-01", "is not YAML: month must be in 1..12"),
        (r'low: "\UFFFFFFFF"', "is not YAML: "),
        ("low: !!bool maybe", "is not YAML: "),
        ("low: " + 3000 * "[", "is not YAML: maximum recursion depth exceeded"),
        ("listen: 8000", "): must be HOST:PORT, not '8000'"),
        ("listen: {host: a, port: 1}", "): must be HOST:PORT, not "),
        ("- 3", "must map names to values"),
        ("a: [", "is not YAML"),
    ],
)
def test_bad_files_end_with_one_line(capsys, config, text, message):
    assert message in fails(capsys, "--config", config(text))


def test_a_file_may_merge_mappings_and_override_what_they_say(config):
    path = config("max-num-seqs: &n 3\n<<: {low: 1, high: 20}\nlow: 2\n")
    settings = parse(Example, ["--config", path])
    assert (settings.max_num_seqs, settings.low, settings.high) == (3, 2, 20)


def test_a_missing_required_flag_is_named(capsys):
    class Strict(Settings):
        """Needs a model."""

        prog: ClassVar[str] = "baton-example"
        model: str = Field(description="folder or hub id")

    with pytest.raises(SystemExit):
        parse(Strict, [])
    assert capsys.readouterr().err == "baton-example: --model: required\n"


def test_help_has_every_flag_with_its_default(capsys):
    with pytest.raises(SystemExit) as exit_:
        parse(Example, ["--help"])
    assert exit_.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "--max-num-seqs N requests in one step (default: 8)" in out
    assert "share of memory, 100% is 1" in out
    assert "--mode {auto,cpu} where to run (default: auto)" in out
    assert "--peer HOST:PORT address of the peer" in out
    assert "--nodes HOST:PORT [HOST:PORT ...] addresses of the nodes" in out
    assert "--fast, --no-fast take the fast way (default: off)" in out
    assert "--ahead, --no-ahead run ahead; unset: where it helps" in out
    assert "--sizes N [N ...] batch sizes" in out
    assert "--size N bytes" in out


def test_version(capsys):
    with pytest.raises(SystemExit) as exit_:
        parse(Example, ["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out.startswith("baton-example 0.")


@pytest.mark.parametrize("text", ["host:1", "[::1]:65535", "10.0.0.1:80"])
def test_addresses_read_as_written(text):
    assert str(HostPort.parse(text)) == text


@pytest.mark.parametrize("text", ["", "host", ":80", "host:", "host:-1", "host:٣", "[]:80", "ho st:80", "http://h:80"])
def test_addresses_that_are_none(text):
    with pytest.raises(ValueError, match="must be"):
        HostPort.parse(text)


def test_settings_import_without_torch():
    code = "import sys; sys.modules['torch'] = None; import baton.settings, baton.telemetry, baton.wire"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_file_may_serve_several_commands(config):
    path = config("max-num-seqs: 3\nmax_body_bytes: 4096\nkv-slots: 8\n")  # the router's, and a node's
    assert parse(Example, ["--config", path]).max_num_seqs == 3


def test_a_misspelt_key_is_an_error_that_names_the_closest(capsys, config):
    line = fails(capsys, "--config", config("max-num-seq: 3"))
    assert line.endswith("has an unknown key 'max-num-seq', did you mean 'max-num-seqs'?\n")
    assert "did you mean 'max-body-bytes'?" in fails(capsys, "--config", config("max-body-byte: 3"))
    assert fails(capsys, "--config", config("qqq: 3")).endswith("has an unknown key 'qqq'\n")


def test_misspelt_variables_are_warned_of(capsys, monkeypatch):
    monkeypatch.setenv("BATON_MAX_NUM_SEQ", "3")
    monkeypatch.setenv("BATON_QQQ", "3")
    monkeypatch.setenv("BATON_KV_SLOTS", "3")  # a node's
    assert parse(Example, []).max_num_seqs == 8
    assert capsys.readouterr().err.splitlines() == [
        "baton-example: warning: BATON_MAX_NUM_SEQ is no setting, did you mean BATON_MAX_NUM_SEQS?",
        "baton-example: warning: BATON_QQQ is no setting",
    ]


def test_what_kubernetes_sets_for_a_service_of_our_name_is_no_setting():
    named = {"BATON_ROUTER_SERVICE_HOST": "10.0.0.1", "BATON_ROUTER_PORT_8000_TCP_ADDR": "10.0.0.1"}
    environ = named | {"BATON_ROUTER_SERVICE_PORT_HTTP": "8000", "BATON_ROUTER_PORT": "tcp://10.0.0.1:8000"}
    assert misspelt_variables(Example, environ) == []
    assert len(misspelt_variables(Example, {"BATON_ROUTER_PORT": "8000"})) == 1


def test_a_flag_wins_over_the_file(config):
    path = config("max-num-seqs: 3\nlow: 2\n")
    settings = parse(Example, ["--config", path, "--max-num-seqs", "5"])
    assert (settings.max_num_seqs, settings.low) == (5, 2)
