"""A lock that clients get in turn."""

import asyncio

from router.offload.fair_lock import FairLock


async def test_clients_take_turns_however_often_one_asks() -> None:
    lock = FairLock()
    order: list[str] = []

    async def take(client: str) -> None:
        turn = lock.of(client)
        await turn.acquire()
        order.append(client)
        await asyncio.sleep(0)
        turn.release()

    await asyncio.gather(*map(take, ["a", "a", "a", "a", "b", "c", "b"]))
    assert order == ["a", "b", "c", "a", "b", "a", "a"]
    assert not lock._of_clients, "clients without requests are forgotten"


async def test_a_request_that_leaves_the_queue_lets_its_client_s_next_one_in() -> None:
    lock = FairLock()
    held, leaves, other = lock.of("a"), lock.of("b"), lock.of("b")
    await held.acquire()
    waiting = asyncio.create_task(leaves.acquire())
    follows = asyncio.create_task(other.acquire())
    await asyncio.sleep(0)
    waiting.cancel()
    held.release()
    await follows
    assert waiting.cancelled()
