"""The account: one row for each request."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.table import Table

from deploy.demo.client import Reply

PHASES_MS = ("queue_ms", "prefill_ms", "transfer_ms", "first_token_ms")


def account(replies: Sequence[Reply]) -> Table:
    """Phases in milliseconds, each measured by the process that did the work."""
    table = Table(box=SIMPLE, header_style="bold", pad_edge=False)
    table.add_column("request")
    for head in (
        "prompt",
        "queue ms",
        "prefill ms",
        "transfer ms",
        "first token ms",
        "tokens/s",
        "cached P",
        "cached D",
    ):
        table.add_column(head, justify="right")
    for reply in replies:
        phases = [f"{reply.timings[phase]:,.1f}" for phase in PHASES_MS]
        cached = [f"{reply.timings[key]:,}" for key in ("cached_tokens", "decode_cached_tokens")]
        table.add_row(reply.name, f"{reply.num_prompt_tokens:,}", *phases, f"{reply.tokens_per_s:,.0f}", *cached)
    return table
