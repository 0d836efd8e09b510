"""The benchmark of the start runs, checks the node, and ends with what its JSON line says. Not how fast it is."""

from __future__ import annotations

import json

import pytest

from benchmarks.serving import startup

pytestmark = pytest.mark.timeout(300)


@pytest.mark.full
def test_startup(capsys: pytest.CaptureFixture[str]) -> None:
    settings = startup.StartupSettings(
        model="baton-tiny", node="--device=cpu --cpu-threads=1 --num-gpu-blocks-override=300"
    )
    line = json.loads(json.dumps(startup.run(settings)))
    assert (line["benchmark"], line["role"], line["num_answered"]) == ("startup", "decode", 16)
    for run in ("cold", "warm"):
        stages = line[f"{run}_stages"]
        assert {"imports", "weights read", "model loaded", "kv pool", "serving"} <= stages.keys()
        assert 0 < stages["imports"] < line[f"{run}_ready_s"]
    assert "caches warm" in capsys.readouterr().out


def test_a_node_that_cannot_start_is_told() -> None:
    with pytest.raises(RuntimeError, match=r"did not get ready:\n.*unrecognized arguments: --nonsense"):
        startup.run(startup.StartupSettings(model="baton-tiny", node="--nonsense"))
