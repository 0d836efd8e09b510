"""A file that lists the nodes, read again when it changes.

    prefill: ["10.0.0.1:9000"]
    decode: ["10.0.0.2:9000", "[fd00::3]:9000"]

YAML, and so JSON too. It may be replaced, or be a symlink that is switched, as with a ConfigMap of Kubernetes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import yaml

from baton.address import HostPort
from baton.node_info import NodeRole
from baton.regular_files import read_regular, stamp_of
from baton.unique_keys import UniqueKeys
from router.discovery.source import Found, Member

log = logging.getLogger(__name__)

POLL_S = 1.0
MAX_BYTES = 4 * 2**20
_FLAG = "--nodes-file"


class BadNodesFile(ValueError):
    """The text says why, and begins with the flag."""


class _Texts(UniqueKeys, yaml.BaseLoader):
    """Lists, mappings and texts: no value is taken for a number or a date, which may be an impossible one."""


class NodesFile:
    """Raises BadNodesFile at construction. If the file cannot be used later, its nodes stay as they were."""

    def __init__(self, path: Path, wait: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(POLL_S)) -> None:
        self.label = f"{_FLAG} {path}"
        self.problem: str | None = None
        self._path = path
        self._wait = wait
        self._stamp, self.members = _read(path)

    async def run(self, found: Found) -> None:
        while True:
            found(self.members)
            await self._wait()
            await asyncio.to_thread(self.look)

    def look(self) -> None:
        """Read the file again if it is another one than before."""
        try:
            if self.problem is None and stamp_of(self._path) == self._stamp:
                return
            self._stamp, self.members = _read(self._path)
        except (BadNodesFile, OSError) as error:
            problem = str(error) if isinstance(error, BadNodesFile) else _unreadable(self._path, error)
            if problem != self.problem:
                log.error("%s; its %d nodes stay", problem, len(self.members))
            self.problem = problem
            return
        self.problem = None
        log.info("read nodes_file=%s nodes=%d", self._path, len(self.members))


def _read(path: Path) -> tuple[tuple[int, ...], frozenset[Member]]:
    """Raises BadNodesFile."""
    try:
        stamp, size = stamp_of(path), path.stat().st_size
        if size > MAX_BYTES:
            raise BadNodesFile(f"{_FLAG}: {path} has {size} bytes, more than {MAX_BYTES}")
        stated = yaml.load(read_regular(path), _Texts)
    except OSError as error:
        raise BadNodesFile(_unreadable(path, error)) from None
    except yaml.YAMLError as error:
        raise BadNodesFile(f"{_FLAG}: {path} is neither YAML nor JSON: {' '.join(str(error).split())}") from None
    try:
        return stamp, parse(stated)
    except ValueError as error:
        raise BadNodesFile(f"{_FLAG}: {path}: {error}") from None


def parse(stated: Any) -> frozenset[Member]:
    """Raises ValueError with the reason."""
    roles = {role.value: role for role in NodeRole}
    if not isinstance(stated, dict):  # also an empty file, which may be one that is being written
        raise ValueError("must have the keys prefill and decode, each with a list of HOST:PORT")
    if unknown := [str(key) for key in stated if key not in roles]:
        raise ValueError(f"{', '.join(unknown)}: the keys are prefill and decode")
    members: dict[HostPort, Member] = {}
    for key, texts in stated.items():
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{key}: must be a list of HOST:PORT")
        for text in texts:
            try:
                member = Member(roles[key], HostPort.parse(text))
            except ValueError as error:
                raise ValueError(f"{key}: {error}") from None
            if members.setdefault(member.address, member).role is not member.role:
                raise ValueError(f"{member.address} is listed as prefill and as decode")
    return frozenset(members.values())


def _unreadable(path: Path, error: OSError) -> str:
    return f"{_FLAG}: cannot read {path}: {error.strerror or error}"
