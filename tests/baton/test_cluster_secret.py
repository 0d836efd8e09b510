"""Both ends of a connection prove that they know the secret, and a proof is of no use elsewhere."""

import asyncio
import itertools

import pytest

from baton.messages import Auth, Subscribe
from baton.rpc.cluster_secret import (
    DATA,
    HANDOFF,
    NONCE_BYTES,
    SESSION,
    ClusterSecret,
    NotTrusted,
    admit,
    new_nonce,
    prove,
    read_secret,
)

KEY = b"sixteen bytes or more"
ONE, OTHER = ClusterSecret(KEY), ClusterSecret(b"another secret as long")
NONCES = bytes(NONCE_BYTES), bytes(range(NONCE_BYTES))
SUBSCRIBE = Subscribe(7, "node")


class Wire:
    """Two ends of a stream, and what went over it."""

    def __init__(self) -> None:
        self.queues: tuple[asyncio.Queue[object], ...] = asyncio.Queue(), asyncio.Queue()
        self.said: list[list[object]] = [[], []]

    def say(self, end: int):
        async def say(message: object) -> None:
            self.said[end].append(message)
            self.queues[end].put_nowait(message)

        return say

    def hear(self, end: int):
        return self.queues[1 - end].get


async def meet(caller: ClusterSecret | None, callee: ClusterSecret | None, purpose: str = SESSION):
    """What becomes of a router that calls a node: of either end, what it returns or raises."""
    wire = Wire()

    async def call() -> None:
        if caller is not None:
            await prove(caller, purpose, "router", wire.say(0), wire.hear(0))
        await wire.say(0)(SUBSCRIBE)

    async def answer() -> object:
        try:
            return await admit(callee, SESSION, "node", "the router", wire.say(1), wire.hear(1))
        except NotTrusted:
            await wire.say(1)(None)  # the call ends
            raise

    async with asyncio.timeout(10):
        return wire, await asyncio.gather(call(), answer(), return_exceptions=True)


async def test_who_knows_the_secret_is_admitted_by_the_name_that_he_proved():
    wire, (called, admitted) = await meet(ONE, ClusterSecret(KEY))
    assert called is None
    assert admitted == ("router", SUBSCRIBE)
    assert wire.said[0][-1] is SUBSCRIBE  # and no sooner
    assert not any(KEY in repr(message).encode() for side in wire.said for message in side)
    assert KEY.decode() not in repr(ONE)


async def test_without_a_secret_nothing_is_said_of_it():
    wire, (_, admitted) = await meet(None, None)
    assert admitted == (None, SUBSCRIBE)
    assert wire.said == [[SUBSCRIBE], []]


@pytest.mark.parametrize(
    ("caller", "callee", "purpose", "reason"),
    [
        (None, ONE, SESSION, "this node wants a cluster secret, and the router has none"),
        (ONE, None, SESSION, "the router has a cluster secret, and this node has none"),
        (OTHER, ONE, SESSION, "the cluster secret differs: what the router has is not this node's"),
        (ONE, ONE, HANDOFF, "the cluster secret differs"),
    ],
)
async def test_who_does_not_fit_is_refused_by_name_and_told_nothing(caller, callee, purpose, reason):
    wire, (_, refused) = await meet(caller, callee, purpose)
    assert isinstance(refused, NotTrusted)
    assert reason in refused.message
    assert not any(message.proof for message in wire.said[1] if message)


async def test_a_caller_tells_nothing_to_who_does_not_know_the_secret():
    for answers in ([None], [Auth()], [SUBSCRIBE], [Auth(nonce=new_nonce()), Auth(proof=bytes(32))]):
        wire, replies = Wire(), iter(answers)

        async def hear(replies=replies):
            return next(replies)

        with pytest.raises(NotTrusted):
            await prove(ONE, SESSION, "router", wire.say(0), hear)
        assert all(isinstance(message, Auth) for message in wire.said[0])


async def test_a_node_is_not_admitted_by_its_own_words():
    """A stranger who sends back what it hears proves nothing."""
    wire, heard = Wire(), [Auth("router", new_nonce())]

    async def say(message: Auth) -> None:
        wire.said[1].append(message)
        heard.append(Auth("router", message.nonce, message.proof))

    async def hear() -> Auth:
        return heard.pop(0)

    with pytest.raises(NotTrusted, match="the cluster secret differs"):
        await admit(ONE, SESSION, "node", "the router", say, hear)


def test_every_part_of_a_connection_is_in_its_proofs():
    made = [
        ONE.proofs(*bound)
        for bound in itertools.product((SESSION, DATA), ("ab", "a"), ("c", "bc"), NONCES, reversed(NONCES))
    ]
    proofs = [proof for pair in made for proof in pair]
    assert len(set(proofs)) == len(proofs)  # also of ("ab", "c") and ("a", "bc"), and of either end
    assert ONE.proofs(SESSION, "a", "b", *NONCES) == ClusterSecret(KEY).proofs(SESSION, "a", "b", *NONCES)


def test_a_file_has_the_secret_and_errors_name_it(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(KEY + b"\n")
    assert read_secret(path).proofs(SESSION, "a", "b", *NONCES) == ONE.proofs(SESSION, "a", "b", *NONCES)
    path.write_bytes(b"short\n")
    with pytest.raises(ValueError, match="has 5 bytes, and needs 16 or more"):
        read_secret(path)
    with pytest.raises(ValueError, match=r"cannot read .*nonesuch: No such file"):
        read_secret(tmp_path / "nonesuch")
