"""A cluster that may be broken, and requests brought into each state of their life and held there.

A request is held by freezing (SIGSTOP) a node that would move it on. That lasts for as long as nobody misses the node:
some seconds, in which a test kills whom it wants to. Where a request may slip through before the freeze takes hold,
the scene is set up once more.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.e2e import reference_file
from tests.e2e.client import Answer, Client, Request
from tests.e2e.cluster import Cluster, Node, Router, wait_until, wait_whole

State = Literal["queued", "prefilling", "handing_off", "decoding"]
STATES: tuple[State, ...] = ("queued", "prefilling", "handing_off", "decoding")
TRIES = 10
_LONG = ("long", 1)
"""A reference of 918 tokens, more than half of what a prefill node's pool holds."""
_SHORT = ("long", 0)
"""One of 35, with 600 tokens of output."""
_MEDIUM = ("ids", 84)
"""One of 461: its prompt is done before a decode node that is frozen meanwhile is missed, however busy the machine."""


class Fragile:
    """Two prefill nodes of small steps and pools, two decode nodes, all running ahead as on a GPU; `all` is in front of
    all four, `pair` of the first of each kind, and so is `late`, which leaves the first token to the decode node. The
    routers prefer the first of each kind when none is busy."""

    def __init__(self, cluster: Cluster) -> None:
        common = ("--max-model-len=1600", "--async-scheduling")
        small = ("--max-num-batched-tokens=16", "--num-gpu-blocks-override=100", *common)
        large = ("--num-gpu-blocks-override=400", *common)
        self.prefill = [cluster.node("prefill", f"prefill-{i}", *small) for i in range(2)]
        self.decode = [cluster.node("decode", f"decode-{i}", *large) for i in range(2)]
        self.all = cluster.router(self.prefill, self.decode, "--policy=least-loaded", name="router-all")
        first = (self.prefill[:1], self.decode[:1])
        placed = "--policy=least-loaded"  # by cost, an idle decode node would compute some prompts itself
        self.pair = cluster.router(*first, placed, name="router-pair")
        self.late = cluster.router(*first, placed, "--first-token=decode", name="router-late")

    @property
    def nodes(self) -> list[Node]:
        return [*self.prefill, *self.decode]

    async def wait_ready(self) -> None:
        """What the first of each kind answers then makes circuit breakers forget the deaths of earlier tests. Until it
        has prefill nodes again, a router of one pair would let the decode node compute prompts."""
        await asyncio.to_thread(self.all.wait_nodes, len(self.prefill), len(self.decode))
        for router in (self.pair, self.late):
            await asyncio.to_thread(router.wait_nodes, 1, 1)
            await asyncio.to_thread(router.wait_ready)
        for router in (self.all, self.pair, self.late):
            async with Client(router) as client:
                await client.complete([7] * 20, max_tokens=2, ignore_eos=True)

    async def wait_whole(self) -> None:
        """Of all nodes that live, also those that a test that failed has left frozen."""
        living = [node for node in self.nodes if node.alive]
        for node in living:
            node.thaw()
        await asyncio.to_thread(wait_whole, living)

    def repair(self) -> None:
        """Start what is dead again; `wait_ready` tells when it is back."""
        for node in self.nodes:
            if not node.alive:
                node.start()

    def neighbours(self, router: Router) -> tuple[list[Node], list[Node]]:
        """Its prefill nodes and its decode nodes."""
        return (self.prefill, self.decode) if router is self.all else (self.prefill[:1], self.decode[:1])


@dataclass
class Scene:
    """`request` is in the wanted state on the first prefill and decode node; `others` were needed for that."""

    request: Held
    others: list[Held] = field(default_factory=list)
    frozen: list[Node] = field(default_factory=list)

    def freeze(self, *nodes: Node) -> None:
        self.frozen += nodes
        for node in nodes:
            node.freeze()

    def thaw(self) -> None:
        """Let all go on that still live."""
        for node in self.frozen:
            if node.alive:
                node.thaw()
        self.frozen.clear()


@dataclass(frozen=True)
class Held:
    """A request under way, and the tokens of its right answer."""

    request: Request
    expected: tuple[int, ...]  # empty: not known

    def is_right(self, answer: Answer) -> bool:
        return answer.done and answer.error is None and tuple(answer.tokens[0]) == self.expected


class Director:
    """Sets up scenes behind one router."""

    def __init__(self, fragile: Fragile, router: Router, client: Client, *, stream: bool) -> None:
        self._fragile = fragile
        self._router = router
        self._client = client
        self._stream = stream

    async def scene(self, state: State) -> Scene:
        """Nothing else runs, before."""
        set_up: dict[State, Callable[[], Awaitable[Scene | None]]] = {
            "queued": self._queued,
            "prefilling": self._prefilling,
            "handing_off": self._handing_off,
            "decoding": self._decoding,
        }
        for _ in range(TRIES):
            await asyncio.to_thread(self._router.wait_idle)
            if scene := await set_up[state]():
                return scene
        raise AssertionError(f"no request stayed {state}")

    async def _queued(self) -> Scene | None:
        """Decode nodes that do not grant leave prompts on the prefill nodes, whose pools have no room for another."""
        prefill, decode = self._fragile.neighbours(self._router)
        first = self._begin(4)
        scene = Scene(first, [first])
        scene.freeze(*decode)
        await asyncio.to_thread(self._router.wait_states, prefilling=1)
        if len(prefill) > 1:
            scene.others.append(self._begin(4, longer=16))  # so that the next one is placed on the first node
        await asyncio.to_thread(self._router.wait_states, prefilling=len(prefill))
        scene.request = self._begin(40)
        await asyncio.to_thread(self._router.wait_states, prefilling=len(prefill), queued=1)
        return scene

    async def _prefilling(self) -> Scene | None:
        scene = Scene(self._begin(40))
        await self._reach("prefilling", scene)
        if not await self._is_at(self._fragile.prefill[0], scene):
            return None
        scene.freeze(self._fragile.prefill[0])
        return await self._kept("prefilling", scene)

    async def _handing_off(self) -> Scene | None:
        """The decode node has granted, and then takes nothing in. A prompt that is done before it is missed."""
        scene = Scene(self._begin(32, _MEDIUM))
        decode = self._fragile.decode[0]

        def why_not() -> str | None:
            has_lease = decode.metric("baton:kv_cache_usage_perc") > 0
            return None if has_lease or scene.request.request.ended else "the decode node has not granted"

        await asyncio.to_thread(wait_until, why_not)
        scene.freeze(decode)
        await self._reach("handing_off", scene)
        return await self._kept("handing_off", scene)

    async def _decoding(self) -> Scene | None:
        scene = Scene(self._begin(160, _SHORT))
        await self._reach("decoding", scene)
        if self._stream:
            await scene.request.request.until(5)
        if not await self._is_at(self._fragile.decode[0], scene):
            return None
        scene.freeze(self._fragile.decode[0])
        return await self._kept("decoding", scene)

    async def _reach(self, state: State, scene: Scene) -> None:
        """Until the request is in this state, or beyond."""
        enough = STATES[STATES.index(state) :]

        def why_not() -> str | None:
            states = self._router.states()
            there = scene.request.request.ended or any(later in states for later in enough)
            return None if there else f"{self._router.name} has {states}, nothing {state}"

        await asyncio.to_thread(wait_until, why_not)

    async def _is_at(self, node: Node, scene: Scene) -> bool:
        """Whether the only request is there. A router that has not heard that a node is idle again takes the next."""
        if await asyncio.to_thread(node.metric, "baton:num_requests_running"):
            return True
        await scene.request.request.leave()
        return False

    async def _kept(self, state: State, scene: Scene) -> Scene | None:
        """The scene, if the freeze came in time."""
        if await asyncio.to_thread(self._router.states) == {state: 1}:
            return scene
        scene.thaw()
        await scene.request.request.leave()
        return None

    def _begin(self, max_tokens: int, which: tuple[str, int] = _LONG, longer: int = 0) -> Held:
        """Made `longer` by some tokens, its right answer is not known."""
        kind, number = which
        reference = reference_file.load().of_kind(kind)[number]
        salt = secrets.token_hex(8)  # a prompt that is cached would be through before it is held
        fields: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": True, "cache_salt": salt}
        prompt = [*[1] * longer, *reference.prompt]
        request = self._client.begin(prompt, stream=self._stream, **fields)
        return Held(request, () if longer else reference.output[:max_tokens])
