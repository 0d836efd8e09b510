"""What the table of hostile cases says of its victim."""

import signal
import subprocess
from dataclasses import asdict

from baton.address import HostPort
from benchmarks.serving.hostile.case import Attack
from benchmarks.serving.hostile.run import Row, gone, table
from benchmarks.serving.hostile.victim import BEGIN, END, LOST, TOKEN, Victim
from benchmarks.serving.hostile.watch import Process

SIZES = {"router": 1, "decode-0": 2}
ROW = Row("a case", "400", 1.0, 20.0, 80.0, 0, SIZES, SIZES, [], {}, "ok", "yes")


def victim(*events: tuple[float, str]) -> Victim:
    one = Victim(HostPort("127.0.0.1", 1))
    one._events = list(events)
    return one


def test_a_gap_counts_where_it_reaches_into_the_time_looked_at() -> None:
    one = victim((0.0, BEGIN), (0.5, TOKEN), (0.6, TOKEN), (1.4, TOKEN), (1.5, TOKEN))
    assert round(one.between(0.55, 2.0).longest_gap_s, 3) == 0.8
    assert round(one.between(1.45, 1.5).longest_gap_s, 3) == 0.1
    assert one.between(0.0, 1.0).num_tokens == 2


def test_silence_until_the_end_is_a_gap() -> None:
    assert victim((0.0, BEGIN), (0.1, TOKEN)).between(0.0, 3.0).longest_gap_s == 2.9


def test_a_stream_that_ends_by_itself_leaves_no_gap() -> None:
    one = victim((0.0, BEGIN), (0.1, TOKEN), (0.2, END), (5.0, BEGIN), (5.1, TOKEN))
    assert round(one.between(0.0, 5.1).longest_gap_s, 3) == 0.1
    assert one.between(0.0, 5.1).lost == []


def test_a_lost_stream_is_a_gap_until_the_next_one_speaks() -> None:
    one = victim((0.0, BEGIN), (0.1, TOKEN), (2.0, f"{LOST} 503"), (2.1, BEGIN), (4.1, TOKEN), (4.2, TOKEN))
    seen = one.between(0.0, 4.2)
    assert (round(seen.longest_gap_s, 3), seen.lost) == (4.0, ["503"])


def test_a_process_that_the_case_ended_has_not_died() -> None:
    with subprocess.Popen(["sleep", "60"]) as stopped, subprocess.Popen(["sleep", "60"]) as killed:
        pids = {"decode-0": stopped.pid, "decode-1": killed.pid, "prefill-0": 0, "router": 0}
        processes = {name: Process(name, pid, {}) for name, pid in pids.items()}
        attack = Attack(HostPort("", 1), HostPort("", 2), {}, processes, 1, 1)
        attack.stop("decode-0")
        attack.kill("decode-1")
    assert [stopped.returncode, killed.returncode] == [-signal.SIGTERM, -signal.SIGKILL]
    dead, ended = gone(attack, {"router": processes["router"]})
    row = asdict(ROW) | {"dead": dead, "ended": ended}
    said = "prefill-0 died; decode-0 stopped when told to; decode-1 was killed"
    assert said in table({"one": row}, {}).markdown()


def test_both_runs_are_in_the_table() -> None:
    before = asdict(ROW) | {"dead": ["decode-0"], "serves": "no"}
    del before["ended"]  # an earlier version's
    text = table({"one": asdict(ROW)}, {"one": before}).markdown()
    assert "decode-0 died; no" in text
    assert text.count("1/2") == 4
