"""The benchmark of the pauses between a CUDA graph's kernels."""

from __future__ import annotations

import json

import pytest

from benchmarks.engine.graph_gaps import GapsSettings, State, changes, counts, main, run


def test_launches_are_looked_at_one_by_one_and_then_less_often() -> None:
    assert list(counts(40)) == [*range(1, 33), 35, 38, 40]
    found = list(counts(20_000))
    assert (found[-1], found == sorted(set(found)), len(found) < 120) == (20_000, True, True)


def test_changes_are_told_from_noise() -> None:
    states = [State(0, 0.93), State(1, 0.95), State(2, 1.11), State(3, 1.12), State(4, 0.94)]
    assert changes(states) == [states[0], states[2], states[4]]
    assert changes([]) == []


def test_the_table_has_the_changes_and_the_last_line_all_states(capsys: pytest.CaptureFixture[str]) -> None:
    states = [State(0, 0.93), State(1, 0.94), State(2, 1.11)]
    seen: list[GapsSettings] = []

    def measure(settings: GapsSettings) -> list[State]:
        seen.append(settings)
        return states

    assert main(["--on", "new", "--before", "3"], measure) == 0
    *rows, last = capsys.readouterr().out.splitlines()
    assert [row.split() for row in rows[1:]] == [["0", "0.930"], ["2", "1.110"]]
    assert json.loads(last)["states"] == [[0, 0.93], [1, 0.94], [2, 1.11]]
    assert [(settings.on, settings.before) for settings in seen] == [("new", 3)]


@pytest.mark.gpu
@pytest.mark.parametrize("in_graphs", [False, True])
def test_replays_are_timed(in_graphs: bool) -> None:
    states = run(GapsSettings(launches=3, before=2, kernels=20, in_graphs=in_graphs))
    assert [state.launches for state in states] == [0, 1, 2, 3]
    assert all(0 < state.kernel_us < 100 for state in states)
