"""The nodes that a router should use, of all sources together, and what an operator changed about them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from baton.address import HostPort
from router.discovery.source import Member, Source

log = logging.getLogger(__name__)

_FLAGS, _ADMIN = "flags", "admin"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A node, and the labels of all sources that have it."""

    member: Member
    sources: tuple[str, ...]


class Membership:
    """The union of `fixed` nodes, those of all `sources`, and those that an operator added, less those that the
    operator excluded. An address that has two roles keeps that of the earlier source.

    What an operator says lasts as long as the process: an excluded address stays out while sources have it, until it is
    added again.
    """

    def __init__(self, fixed: Iterable[Member], sources: Sequence[Source] = ()) -> None:
        self._sources = sources
        self._known: dict[str, frozenset[Member]] = {
            _FLAGS: frozenset(fixed),
            **{source.label: frozenset() for source in sources},
            _ADMIN: frozenset(),
        }
        self._excluded: set[HostPort] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._changed: Callable[[], None] = lambda: None

    def start(self, changed: Callable[[], None]) -> None:
        """Begin to ask the sources; `changed` is called whenever the wanted set or a problem may be another."""
        self._changed = changed
        for source in self._sources:
            task = asyncio.create_task(source.run(partial(self._found, source.label)), name=source.label)
            self._tasks.append(task)
            task.add_done_callback(_log_end)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def wanted(self) -> dict[HostPort, Wanted]:
        """By address."""
        wanted: dict[HostPort, Wanted] = {}
        for label, members in self._known.items():
            for member in sorted(members, key=lambda m: (m.role.value, str(m.address))):
                first = wanted.setdefault(member.address, Wanted(member, ()))
                if member.role is first.member.role:
                    wanted[member.address] = Wanted(first.member, (*first.sources, label))
        return {address: node for address, node in wanted.items() if address not in self._excluded}

    def problems(self) -> list[str]:
        """Of sources, and of addresses with two roles."""
        problems = [source.problem for source in self._sources if source.problem]
        roles: dict[HostPort, Member] = {}
        for label, members in self._known.items():
            for member in sorted(members, key=str):
                first = roles.setdefault(member.address, member)
                if first.role is not member.role and member.address not in self._excluded:
                    problems.append(
                        f"{member.address} is a {first.role.value} node, but {member.role.value} in {label}"
                    )
        return problems

    # ---- what an operator says ----

    def add(self, member: Member) -> None:
        """Also lifts an exclusion. Raises ValueError if the address is there in the other role."""
        known = next((m for members in self._known.values() for m in members if m.address == member.address), None)
        if known is not None and known.role is not member.role:
            raise ValueError(f"{member.address} is a {known.role.value} node already")
        self._excluded.discard(member.address)
        if known is None:
            self._known[_ADMIN] |= {member}
        self._changed()

    def exclude(self, *addresses: HostPort) -> None:
        """Do not want them, whichever source has them."""
        self._known[_ADMIN] = frozenset(m for m in self._known[_ADMIN] if m.address not in addresses)
        self._excluded.update(addresses)
        self._forget_exclusions()
        self._changed()

    def _found(self, label: str, members: frozenset[Member]) -> None:
        before, self._known[label] = self._known[label], members
        if gone := before - members:
            log.info("source=%s gone=%s", label, ",".join(sorted(str(member.address) for member in gone)))
        if new := members - before:
            log.info("source=%s new=%s", label, ",".join(sorted(str(member.address) for member in new)))
        self._forget_exclusions()
        self._changed()

    def _forget_exclusions(self) -> None:
        """Of addresses that no source has: a node that comes there later is another one."""
        self._excluded &= {member.address for members in self._known.values() for member in members}


def _log_end(task: asyncio.Task[None]) -> None:
    """A source runs until it is cancelled: anything else is our own mistake."""
    if not task.cancelled() and (error := task.exception()):
        log.error("source=%s internal error, its nodes stay", task.get_name(), exc_info=error)
