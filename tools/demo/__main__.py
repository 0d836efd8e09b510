"""The program behind `make demo`. Exits with 1 and a reason if any check fails."""

from __future__ import annotations

import asyncio
import sys
import time

import httpx
import openai
from rich.console import Console

from tools.demo.client import Client
from tools.demo.cluster import Cluster, DemoFailed, running_cluster
from tools.demo.scenes import Show
from tools.demo.table import account

AFTERWARDS = """\
[bold]Go on with[/]
  .venv/bin/baton-up                       [dim]a cluster that stays[/]
  curl http://127.0.0.1:8000/v1/models     [dim]README.md has more to ask it[/]
  make test                                [dim]what holds this together[/]"""


async def demo(console: Console) -> None:
    began = time.monotonic()
    console.print("[bold]baton[/]: one node reads the prompt, another writes the answer", highlight=False)
    starting = console.status("[dim]starting a router, a prefill node and a decode node", spinner="dots")
    starting.start()
    try:
        async with running_cluster() as cluster:
            starting.stop()
            took_s = time.monotonic() - began
            console.print(
                f"[dim]a router, a prefill node and a decode node: ready after {took_s:.1f} s", highlight=False
            )
            await show(console, cluster)
    finally:
        starting.stop()
    console.print(f"[dim]{time.monotonic() - began:.0f} s in all\n", highlight=False)
    console.print(AFTERWARDS, highlight=False)


async def show(console: Console, cluster: Cluster) -> None:
    client = Client(cluster.http)
    try:
        shown = Show(console, cluster, client)
        await shown.streamed_answer()
        await shown.fact_in_a_long_text()
        await shown.eight_at_once()
        await shown.cancelled()
        console.print("\n[bold cyan]Where the time went")
        console.print(account(shown.replies))
    finally:
        await client.close()


def main() -> int:
    console = Console(highlight=False)
    try:
        asyncio.run(demo(console))
    except (DemoFailed, openai.OpenAIError, httpx.HTTPError) as error:
        console.print(f"[bold red]The demo failed:[/] {error}", markup=True, highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("\n[dim]interrupted; all its processes are gone")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
