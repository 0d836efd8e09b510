"""A model is replaced by a newer version of it under load, node by node, behind two routers that share the nodes."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.client import Answer, Client
from tests.e2e.cluster import MODEL, Cluster, Node, Router, wait_until, wait_whole

pytestmark = pytest.mark.timeout(300)

CHECKPOINT = Path(__file__).resolve().parents[2] / "engine" / "checkpoints" / MODEL
PROMPTS = [[5 + (7 * i + j) % 200 for j in range(24)] for i in range(2)]
LENGTH = 24
PAIRS = {("prefill-old", "decode-old"), ("prefill-new", "decode-new")}
Texts = list[list[int]]


def changed_checkpoint(folder: Path) -> Path:
    """The model, with other weights."""
    shutil.copytree(CHECKPOINT, folder)
    generator = torch.Generator().manual_seed(1)
    weights = load_file(folder / "model.safetensors")
    for weight in weights.values():
        noise = torch.randn(weight.shape, generator=generator) * weight.float().std()
        weight += (0.5 * noise).to(weight.dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def list_nodes(file: Path, nodes: Sequence[Node]) -> None:
    """Replace the file at once, as an operator's tools do."""
    fresh = file.with_suffix(".fresh")
    lists = {role: [str(node.address) for node in nodes if node.role == role] for role in ("prefill", "decode")}
    fresh.write_text(json.dumps(lists))
    fresh.replace(file)


class Load:
    """Clients of all routers, each of which asks again and again."""

    def __init__(self, clients: Sequence[Client]) -> None:
        self._clients = clients
        self._stopped = asyncio.Event()
        self._seen = asyncio.Event()
        self.answers: list[tuple[int, Answer]] = []

    async def run(self) -> None:
        await asyncio.gather(*(self._ask(client, i) for client in self._clients for i in range(len(PROMPTS))))

    async def _ask(self, client: Client, prompt: int) -> None:
        while not self._stopped.is_set():
            self.answers.append((prompt, await ask(client, prompt)))
            self._seen.set()

    def stop(self) -> None:
        self._stopped.set()

    async def until_from(self, node: Node) -> None:
        """Until that node has given an answer that was asked for from now on."""
        known = len(self.answers)
        while not any(answer.timings.get("decode_node") == node.name for _, answer in self.answers[known:]):
            self._seen.clear()
            await self._seen.wait()


async def ask(client: Client, prompt: int, **fields: object) -> Answer:
    return await client.complete(PROMPTS[prompt], stream=True, max_tokens=LENGTH, ignore_eos=True, **fields)


async def texts_of(client: Client, **fields: object) -> Texts:
    return [(await ask(client, i, **fields)).tokens[0] for i in range(len(PROMPTS))]


async def wait_nodes(routers: Sequence[Router], prefill: int, decode: int) -> None:
    for router in routers:
        await asyncio.to_thread(router.wait_nodes, prefill, decode)


def why_not_gone(router: Router, nodes: Sequence[Node]) -> str | None:
    shown = router.page("/debug/nodes").json()["nodes"]
    gone = {str(node.address) for node in nodes}
    left = [node for node in shown if node["address"] in gone]
    return f"{router.name} still has {left}" if left else None


async def test_an_upgrade_under_load_loses_no_request_and_mixes_no_texts(cluster: Cluster, tmp_path: Path) -> None:
    flags = (f"--model={changed_checkpoint(tmp_path / 'newer')}", f"--served-model-name={MODEL}")
    old = [cluster.node("prefill", "prefill-old"), cluster.node("decode", "decode-old")]
    new = [cluster.node("prefill", "prefill-new", *flags), cluster.node("decode", "decode-new", *flags)]
    file = tmp_path / "nodes.json"
    list_nodes(file, old)
    routers = [cluster.router([], [], f"--nodes-file={file}", name=f"router-{i}") for i in range(2)]
    for router in routers:
        await asyncio.to_thread(router.wait_ready)
    async with Client(routers[0]) as one, Client(routers[1]) as two:
        before = await texts_of(one)
        load = Load([one, two])
        running = asyncio.create_task(load.run())
        await load.until_from(old[1])
        list_nodes(file, old + new)
        await wait_nodes(routers, 2, 2)
        await load.until_from(new[1])
        list_nodes(file, new)
        for router in routers:
            await asyncio.to_thread(wait_until, partial(why_not_gone, router, old))
        for node in old:
            assert await asyncio.to_thread(node.terminate) == 0
        await load.until_from(new[1])
        load.stop()
        await running
        after = await texts_of(two)
        check(load.answers, before, after)
        await two_names(cluster, file, old[1], new, routers[0], before, after)
    await asyncio.to_thread(wait_whole, new)


def check(answers: Sequence[tuple[int, Answer]], before: Texts, after: Texts) -> None:
    assert all(mine != theirs for mine, theirs in zip(before, after, strict=True)), "the versions say the same"
    seen = set()
    for prompt, answer in answers:
        assert (answer.status, answer.error, answer.done) == (200, None, True)
        pair = answer.timings["prefill_node"], answer.timings["decode_node"]
        assert pair in {*PAIRS, ("decode-new", "decode-new")}, "a decode node that was found first may compute alone"
        assert answer.tokens[0] == (before if pair[1] == "decode-old" else after)[prompt]
        assert answer.timings["attempts"] == 1, "a node that is drained finishes what it has"
        seen.add(pair)
    assert seen >= PAIRS


async def two_names(
    cluster: Cluster, file: Path, gone: Node, new: list[Node], router: Router, before: Texts, after: Texts
) -> None:
    """The older model comes back, beside the newer one, under a name of its own."""
    other = cluster.same_address(gone, "decode-other", "--served-model-name=other")
    list_nodes(file, [*new, other])
    await wait_nodes([router], 1, 2)
    async with Client(router) as client:
        assert await texts_of(client, model="other") == before
        assert await texts_of(client, model=MODEL) == after
        assert (await client.complete(PROMPTS[0], max_tokens=4)).status == 400
        assert (await client.complete(PROMPTS[0], max_tokens=4, model="none")).status == 404
