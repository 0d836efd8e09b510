"""The umbrella command: what it lists, refuses, imports and completes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from unittest.mock import patch

import pytest

from deploy import command, completion
from deploy.command import SUBCOMMANDS

ROOT = Path(__file__).resolve().parents[2]


def test_help_has_a_line_for_each_subcommand(capsys):
    command.main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    for name, subcommand in SUBCOMMANDS.items():
        assert [line for line in lines if line.split()[:1] == [name] and line.endswith(subcommand.summary)]


def test_an_unknown_subcommand_exits_with_2_and_the_nearest_name(capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["benhc"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "baton: no subcommand 'benhc', did you mean 'bench'?\n"


@pytest.mark.parametrize("name", ["up", "router", "prefill", "decode", "bench", "doctor", "tune", "top"])
def test_arguments_reach_the_subcommand(name, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main([name, "--no-such-flag"])
    assert ended.value.code == 2
    assert "--no-such-flag" in capsys.readouterr().err


def test_ctrl_c_ends_a_subcommand_without_a_traceback(capsys):
    with patch("deploy.command.print_version", side_effect=KeyboardInterrupt), pytest.raises(SystemExit) as ended:
        command.main(["version"])
    assert ended.value.code == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_stop_signals_are_a_ctrl_c_to_what_does_not_serve(name):
    handler = []
    run = lambda _: handler.append(signal.getsignal(signal.SIGTERM))  # noqa: E731
    with patch("deploy.command.load", return_value=run):
        command.main([name])
    serves = name in ("up", "router", "prefill", "decode")
    assert (handler[0] is signal.default_int_handler) is not serves


def test_commands_with_names_of_their_own_are_subcommands():
    """So that signals and readers that leave find them as prepared."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    own = {name.removeprefix("baton-"): entry for name, entry in scripts.items() if name != "baton"}
    assert own.keys() == {"up", "router", "prefill", "decode"}
    for name, entry in own.items():
        assert entry == f"deploy.command:{name}"
        with patch("deploy.command._run") as run, patch("sys.argv", [f"baton-{name}", "--model", "m"]):
            getattr(command, name)()
        run.assert_called_once_with(name, ["--model", "m"])


SLOW = """
import os, signal, sys
print("baton.settings" in sys.modules)
os.kill(int(os.environ["SELF"]), signal.SIGTERM)
signal.pause()
"""
FIRST = """
import os
os.environ["SELF"], os.getpid = str(os.getpid()), lambda: 1
from deploy.command import SUBCOMMANDS, Subcommand, main
SUBCOMMANDS["slow"] = Subcommand("", "slow:main", serves=True)
main(["slow"])
"""


def test_a_containers_first_process_ends_at_a_signal_before_its_subcommand_is_imported(tmp_path):
    """Nothing that takes long is imported before it does."""
    (tmp_path / "slow.py").write_text(SLOW)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "PYTHONUNBUFFERED": "1"}
    ran = subprocess.run([sys.executable, "-c", FIRST], check=False, timeout=60, env=env, capture_output=True)
    assert (ran.returncode, ran.stdout) == (128 + signal.SIGTERM, b"False\n"), ran.stderr


@pytest.mark.parametrize("words", [["version"], ["bench", "--help"], ["completion", "bash"]])
def test_a_reader_that_leaves_is_no_error(words):
    ours, theirs = os.pipe()
    os.close(ours)
    argv = [sys.executable, "-m", "deploy.command", *words]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    try:
        ran = subprocess.run(argv, stdout=theirs, stderr=subprocess.PIPE, check=False, timeout=60, env=buffered)
    finally:
        os.close(theirs)
    assert ran.stderr == b""


def test_another_broken_pipe_is_told(capsys):
    with patch("deploy.command.print_version", side_effect=BrokenPipeError), pytest.raises(BrokenPipeError):
        command.main(["version"])


def test_version_bench_and_top_import_no_torch():
    code = (
        "import sys\nfrom deploy.command import main, load, SUBCOMMANDS\nmain(['version'])\n"
        "load(SUBCOMMANDS['bench'].entry)\nload(SUBCOMMANDS['top'].entry)\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'router', 'node', 'engine'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    version, imported = ran.stdout.splitlines()
    assert version.startswith("baton ")
    assert imported == "[]"


def test_doctor_and_tune_import_no_torch():
    code = (
        "import sys\nfrom deploy.command import load, SUBCOMMANDS\n"
        "for name in ('doctor', 'tune'): load(SUBCOMMANDS[name].entry)\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'ucxx'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout == "[]\n"


def completed(tmp_path: Path, *words: str) -> set[str]:
    """What bash offers after these words, the last of which is being typed."""
    script = tmp_path / "completion.bash"
    script.write_text(completion._bash())
    quoted = " ".join(f"'{word}'" for word in words)
    code = f"source {script}; COMP_WORDS=(baton {quoted}); COMP_CWORD={len(words)}; _baton; echo ${{COMPREPLY[@]}}"
    return set(subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_bash_completes_subcommands_flags_and_choices(tmp_path):
    assert completed(tmp_path, "ve") == {"version"}
    assert completed(tmp_path, "bench", "--goodput-t") == {"--goodput-ttft"}
    assert completed(tmp_path, "bench", "--arrival", "") == {"poisson", "fixed", "burst"}
    assert completed(tmp_path, "router", "--otlp") == {"--otlp-traces-endpoint"}
    assert completed(tmp_path, "completion", "") == {"bash", "zsh", "fish"}


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_every_flag(shell, capsys):
    completion.main([shell])
    script = capsys.readouterr().out
    for subcommand in SUBCOMMANDS.values():
        for flag, _ in completion.flags_of(subcommand):
            assert flag.removeprefix("--") in script


def test_an_unknown_shell_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        completion.main(["tcsh"])
    assert ended.value.code == 2
    assert "bash, zsh, fish" in capsys.readouterr().err
