"""What `baton top` shows of a snapshot."""

from __future__ import annotations

import math
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deploy.top.history import History
from deploy.top.source import Snapshot

_STYLES = {
    "up": "green",
    "draining": "yellow",
    "stopping": "yellow",
    "connecting": "dim",
    "down": "red",
    "incompatible": "yellow",
    "avoided": "yellow",
}
_FULL = 0.9


def view(snapshot: Snapshot, history: History, url: str, trouble: str = "") -> RenderableType:
    """`trouble`: why it is not of this moment."""
    style = "green" if snapshot["status"] == "ready" else "yellow" if snapshot["is_ready"] else "red"
    head = Text.assemble(
        ("baton ", "bold"), f"{plain(snapshot['version'])}  {url}  ", (plain(snapshot["status"]), style)
    )
    lines: list[RenderableType] = [head, _requests(snapshot), _latencies(history), _nodes(snapshot, history)]
    if trouble:
        lines.append(Text(trouble, "red"))
    return Group(*lines)


def _requests(snapshot: Snapshot) -> Text:
    states = {name: number for name, number in snapshot["work"]["requests"].items() if number}
    parts = ", ".join(f"{number} {plain(name).replace('_', ' ')}" for name, number in states.items())
    failed = snapshot["work"]["num_ended"].get("failed", 0)
    return Text(
        f"requests  {sum(states.values())} in flight{f' ({parts})' if parts else ''}, {failed} failed since the start; "
        f"bottleneck {plain(snapshot['bottleneck'])}"
    )


def _latencies(history: History) -> Text:
    pieces = []
    for name, title in (("first_token_s", "TTFT"), ("inter_token_s", "ITL")):
        median, p99 = (seconds(history.quantile(name, share)) for share in (0.5, 0.99))
        pieces.append(f"{title} median {median}, p99 {p99}")
    rates = (history.rate(name) for name in ("num_generation_tokens", "num_prompt_tokens"))
    output, prompt = (f"{rate:,.0f}" for rate in rates)
    return Text(f"latency   {'; '.join(pieces)}; {output} output and {prompt} prompt tokens/s")


def _nodes(snapshot: Snapshot, history: History) -> Table:
    kv_rates, token_rates = history.kv_rates(), history.token_rates()
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), header_style="bold", expand=False)
    for head in ("node", "role", "state"):
        table.add_column(head, no_wrap=True)
    for head in ("KV", "running", "waiting", "tokens/s", "KV moved"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    for node in snapshot["nodes"]:
        state, why = state_of(node)
        name = plain(node["node_id"] or node["address"])
        moved = f"{size(kv_rates.get(node['incarnation'], 0.0))}/s"
        tokens = f"{token_rates.get(node['incarnation'], 0.0):,.0f}"
        row = (Text(name), node["role"], Text(state, _STYLES[state]), *_load(node), tokens, moved, Text(plain(why)))
        table.add_row(*row)
    for problem in snapshot["problems"]:
        table.add_row("", "", "", "", "", "", "", "", Text(plain(problem), "yellow"))
    return table


def state_of(node: dict[str, Any]) -> tuple[str, str]:
    """One of _STYLES, as in the console, and why it is not up."""
    down = node["state"] == "connecting" and node["problem"] != "not reached yet"
    return "down" if down else node["state"], node["problem"] or ""


def _load(node: dict[str, Any]) -> tuple[Text, str, str]:
    load = node["load"]
    if not load:
        return Text("-"), "-", "-"
    total = load["num_blocks_total"]
    share = 1 - load["num_blocks_free"] / total if total else 0.0
    return Text(f"{share:.0%}", "red" if share >= _FULL else ""), str(load["num_running"]), str(load["num_waiting"])


def plain(text: str) -> str:
    """Without characters that a terminal obeys."""
    return "".join(character if character.isprintable() else "?" for character in text)


def seconds(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{1e3 * value:.3g} ms" if value < 1 else f"{value:.3g} s"


def size(num_bytes: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.3g} TB"
