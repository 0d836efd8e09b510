"""Sources of nodes: what they make of DNS, of a file, and of what an operator says."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from baton.address import HostPort
from baton.node_info import NodeRole
from router.discovery import dns
from router.discovery.dns import DnsName
from router.discovery.membership import Membership
from router.discovery.nodes_file import BadNodesFile, NodesFile, parse
from router.discovery.source import Found, Member

P, D = NodeRole.PREFILL, NodeRole.DECODE
NAME = HostPort("decode.svc", 9000)


def at(text: str) -> HostPort:
    return HostPort.parse(text)


class Resolver:
    """Answers what it is told to, or raises it."""

    def __init__(self, *answers: Iterable[str] | OSError) -> None:
        self.answers = list(answers)

    async def __call__(self, name: str) -> Iterable[str]:
        assert name == "decode.svc"
        answer = self.answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer


async def test_each_address_of_a_name_is_a_node_and_a_failed_lookup_keeps_them() -> None:
    unknown = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    source = DnsName(D, NAME, 0.0, Resolver(["10.0.0.1", "fd00::2"], unknown, ["10.0.0.3"]))
    assert source.problem == "--decode-dns decode.svc:9000: not looked up yet"
    seen: asyncio.Queue[tuple[set[str], str | None]] = asyncio.Queue()

    def found(members: frozenset[Member]) -> None:
        assert all(member.name == "decode.svc" and member.role is D for member in members)
        seen.put_nowait(({str(member.address) for member in members}, source.problem))

    task = asyncio.create_task(source.run(found))
    both = {"10.0.0.1:9000", "[fd00::2]:9000"}
    assert [await seen.get() for _ in range(3)] == [
        (both, None),
        (both, "--decode-dns decode.svc:9000: Name or service not known"),
        ({"10.0.0.3:9000"}, None),
    ]
    task.cancel()
    await asyncio.wait((task,))


async def test_a_resolver_that_hangs_is_a_failed_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(name: str) -> Iterable[str]:
        await asyncio.Event().wait()
        return ()

    monkeypatch.setattr(dns, "LOOKUP_TIMEOUT_S", 0.01)
    source = DnsName(D, NAME, 1.0, hang)
    await source.look()
    assert source.problem == "--decode-dns decode.svc:9000: no answer within 0.01 s"


async def test_the_systems_resolver_knows_this_machine() -> None:
    assert await dns.resolve("127.0.0.1") == {"127.0.0.1"}
    assert await dns.resolve("::1") == {"::1"}
    with pytest.raises(OSError, match="service"):
        await dns.resolve("::1::1")  # no address, so it is a name, which cannot be one


def test_the_end_waits_for_no_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [] if answer.wait() else None)
    monkeypatch.setattr(dns, "LOOKUP_TIMEOUT_S", 0.01)
    source = DnsName(D, NAME, 1.0)
    process = threading.Thread(target=lambda: asyncio.run(source.look()))
    process.start()
    process.join(5.0)
    try:
        assert not process.is_alive()
        assert source.problem == "--decode-dns decode.svc:9000: no answer within 0.01 s"
    finally:
        answer.set()
        process.join()


# ---- the file ----


def write(path: Path, text: str) -> None:
    """Replace it at once."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


@pytest.mark.parametrize("form", ["yaml", "json"])
def test_a_file_lists_nodes(tmp_path: Path, form: str) -> None:
    path = tmp_path / "nodes"
    lists = {"prefill": ["a:1"], "decode": ["[fd00::1]:2", "b:3"]}
    path.write_text(
        json.dumps(lists) if form == "json" else "prefill: ['a:1']\ndecode:\n- '[fd00::1]:2'\n- b:3  # the second\n"
    )
    assert NodesFile(path).members == {Member(P, at("a:1")), Member(D, at("[fd00::1]:2")), Member(D, at("b:3"))}


@pytest.mark.parametrize(
    "broken",
    [
        "decode: [2026-13-01]",
        "decode: [0x_]",
        f"decode: [{'9' * 5000}]",
        "decode: [!!int '']",
        "decode: [!!timestamp now]",
        r'decode: ["\UFFFFFFFF:1"]',
        r'decode: ["\U00110000:1"]',
        f"%YAML {'9' * 5000}.1\n---\ndecode: []",
        r'decode: ["a\0:1"]',
        "decode: &all [*all]",
        "[" * 5000,
        "decode: ['a:1']\ndecode: ['b:1']",
    ],
)
def test_whatever_a_file_says_is_a_problem_and_never_an_error(tmp_path: Path, broken: str) -> None:
    """An error would end the source: the file would not be read again."""
    path = tmp_path / "nodes.yaml"
    path.write_text("decode: ['a:1']")
    source = NodesFile(path)
    write(path, broken)
    source.look()
    assert source.members == {Member(D, at("a:1"))}
    assert str(source.problem).startswith("--nodes-file: ")
    write(path, "decode: ['b:1']")
    source.look()
    assert source.members == {Member(D, at("b:1"))}
    assert source.problem is None


def test_a_broken_file_keeps_the_nodes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "nodes.yaml"
    path.write_text("decode: ['a:1']")
    source = NodesFile(path)
    first = source.members
    for broken, why in (("", "must have the keys"), ("decode: [", "neither YAML nor JSON"), (None, "cannot read")):
        if broken is None:
            path.unlink()
        else:
            write(path, broken)
        source.look()
        source.look()
        assert source.members == first
        assert why in str(source.problem)
    assert len(caplog.records) == 3, "once each"
    write(path, "decode: ['a:1']")
    source.look()
    assert source.problem is None
    write(path, "decode: ['b:1']")
    source.look()
    assert source.members == {Member(D, at("b:1"))}
    aside = path.rename(tmp_path / "aside")
    source.look()
    assert source.problem
    aside.rename(path)
    source.look()
    assert source.problem is None, "though it is the file that it was"


def test_a_symlink_may_be_switched(tmp_path: Path) -> None:
    """As Kubernetes does: nodes.yaml -> ..data/nodes.yaml, ..data -> a folder."""
    for name, node in (("one", "a:1"), ("two", "b:1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "nodes.yaml").write_text(f"decode: ['{node}']")
    data, path = tmp_path / "..data", tmp_path / "nodes.yaml"
    data.symlink_to("one")
    path.symlink_to("..data/nodes.yaml")
    source = NodesFile(path)
    assert source.members == {Member(D, at("a:1"))}
    fresh = tmp_path / "..tmp"
    fresh.symlink_to("two")
    fresh.replace(data)
    source.look()
    assert source.members == {Member(D, at("b:1"))}


@pytest.mark.parametrize(
    ("stated", "why"),
    [
        (["a:1"], "must have the keys prefill and decode"),
        ({"decoder": []}, "decoder: the keys are prefill and decode"),
        ({"decode": "a:1"}, "decode: must be a list of HOST:PORT"),
        ({"decode": [1]}, "decode: must be a list of HOST:PORT"),
        ({"decode": ["a"]}, "decode: must be HOST:PORT, not 'a'"),
        ({"decode": ["a:1"], "prefill": ["a:1"]}, "a:1 is listed as prefill and as decode"),
    ],
)
def test_a_file_that_lists_no_nodes_says_why(stated: object, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse(stated)


def test_a_file_that_is_missing_at_the_start_ends_it(tmp_path: Path) -> None:
    with pytest.raises(BadNodesFile, match=f"--nodes-file: cannot read {tmp_path}/none: No such file"):
        NodesFile(tmp_path / "none")


async def test_a_file_is_looked_at_again_and_again(tmp_path: Path) -> None:
    path = tmp_path / "nodes.yaml"
    path.write_text("decode: ['a:1']")
    texts = iter(("decode: ['bb:1']", "decode: []"))
    done = asyncio.Event()

    async def wait() -> None:
        text = next(texts, None)
        if text is None:
            done.set()
            await asyncio.Event().wait()
        else:
            write(path, text)

    seen: list[list[str]] = []
    source = NodesFile(path, wait)
    task = asyncio.create_task(source.run(lambda members: seen.append([str(m.address) for m in members])))
    await done.wait()
    task.cancel()
    await asyncio.wait((task,))
    assert seen == [["a:1"], ["bb:1"], []]


# ---- all sources together ----


class Told:
    """A source that a test speaks for."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.problem: str | None = None
        self.found: Found = lambda members: None

    async def run(self, found: Found) -> None:
        self.found = found
        await asyncio.Event().wait()


async def test_the_wanted_set_is_the_union_less_what_an_operator_excluded() -> None:
    one, two = Told("one"), Told("two")
    membership = Membership([Member(P, at("p:1"))], [one, two])
    changes: list[list[str]] = []
    membership.start(lambda: changes.append(sorted(map(str, membership.wanted()))))
    await asyncio.sleep(0)
    both, only = Member(D, at("d:1")), Member(D, at("d:2"))
    one.found(frozenset({both}))
    two.found(frozenset({both, only}))
    assert membership.wanted()[both.address].sources == ("one", "two")
    one.found(frozenset())
    assert membership.wanted()[both.address].sources == ("two",)
    membership.exclude(both.address)
    membership.add(Member(D, at("d:3")))
    assert changes[-1] == ["d:2", "d:3", "p:1"]
    two.found(frozenset({both, only}))
    assert changes[-1] == ["d:2", "d:3", "p:1"], "it is out while a source has it"
    membership.add(both)
    assert changes[-1] == ["d:1", "d:2", "d:3", "p:1"]
    membership.exclude(both.address)
    two.found(frozenset())
    two.found(frozenset({both}))
    assert changes[-1] == ["d:1", "d:3", "p:1"], "whoever comes there later is another"
    membership.exclude(at("d:3"))
    assert changes[-1] == ["d:1", "p:1"]
    await membership.close()


async def test_an_address_has_the_role_of_its_first_source() -> None:
    one = Told("one")
    membership = Membership([Member(P, at("a:1"))], [one])
    membership.start(lambda: None)
    await asyncio.sleep(0)
    one.problem = "one: down"
    one.found(frozenset({Member(D, at("a:1"))}))
    ((_, wanted),) = membership.wanted().items()
    assert (wanted.member.role, wanted.sources) == (P, ("flags",))
    assert membership.problems() == ["one: down", "a:1 is a prefill node, but decode in one"]
    with pytest.raises(ValueError, match="a:1 is a prefill node already"):
        membership.add(Member(D, at("a:1")))
    await membership.close()


async def test_a_source_that_fails_is_told_and_keeps_its_nodes(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Told):
        async def run(self, found: Found) -> None:
            found(frozenset({Member(D, at("d:1"))}))
            raise RuntimeError("our mistake")

    membership = Membership([], [Broken("broken")])
    membership.start(lambda: None)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert list(membership.wanted()) == [at("d:1")]
    assert "source=broken internal error" in caplog.text
    await membership.close()
