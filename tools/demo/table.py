"""The summary: one row for each request."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.table import Table

from tools.demo.client import Reply

PHASES = {"queue": "queue_ms", "prefill": "prefill_ms", "transfer": "transfer_ms", "first\ntoken": "first_token_ms"}
CACHED = ("cached_tokens", "decode_cached_tokens")


def account(replies: Sequence[Reply]) -> Table:
    """A table with each phase as measured by the process that did the work; fits a terminal of 80 columns."""
    caption = "phases in ms; transfer: what of it computing did not hide\n"
    caption += "cached: prompt tokens found on the prefill + the decode node"
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), header_style="bold", caption=caption, caption_justify="left")
    table.add_column("request", no_wrap=True)
    for head in ("prompt", *PHASES, "tok/s", "cached"):
        table.add_column(head, justify="right", no_wrap=True)
    for reply in replies:
        phases = [f"{reply.timings[key]:,.1f}" for key in PHASES.values()]
        cached = "+".join(f"{reply.timings[key]:,}" for key in CACHED)
        table.add_row(reply.name, f"{reply.num_prompt_tokens:,}", *phases, f"{reply.tokens_per_s:,.0f}", cached)
    return table
