"""The transport over NIXL: one-sided writes into granted slots, over InfiniBand, RoCE, NVLink, or TCP.

Found by experiment with NIXL 1.5.1 and its own UCX, November 2026: an agent learns of a peer's additional memory by
loading its metadata again; a write that is DONE is in the peer's memory; over TCP, bytes move only while both ends poll
for notifications; a write cannot be cancelled, so one that is cut off is awaited (`pair/transport.py`) before its
memory is reused.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import logging
import os
import struct
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from baton.errors import TransferError
from kv_transfer import NIXL_PACKAGES
from kv_transfer.async_operation import AsyncOperation, RemoteSlot
from kv_transfer.transports.host import net_devices
from kv_transfer.transports.pair.carrier import Note, OneSidedReceiving

_PLACE = struct.Struct("<QI")  # address, device


class NixlCarrier:
    """A NIXL agent over all slots' memory. interface, host: as for UCX (`net_devices`); NIXL bundles its own UCX, which
    is configured by the environment only. Raises TransferError when the package is not installed."""

    kind = "nixl"
    memory = b""

    def __init__(self, device: torch.device, interface: str | None, host: str) -> None:
        self._api, version = _load()
        self.version = ".".join(version.split(".")[:2])
        self.device = device
        self.segment = "VRAM" if device.type == "cuda" else "DRAM"
        self._devices = net_devices(host, interface)
        self._registered: dict[int, tuple[Any, Tensor]] = {}  # by address
        self._peers: Counter[str] = Counter()  # connections that may write to them

    def start(self, name: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.cuda.current_stream().synchronize()  # makes the device's context current on this thread
        config = self._api.nixl_agent_config(enable_prog_thread=False, backends=[])  # its thread would burn a core
        self.agent = self._api.nixl_agent(name, config)
        if self._devices is not None:
            os.environ["UCX_NET_DEVICES"] = self._devices  # the parameter `ucx_devices` has no effect
        self.agent.create_backend("UCX", {})

    def sending(self, peer: str, memory: bytes, note: Note) -> NixlSending:
        self._peers[peer] += 1
        return NixlSending(self, peer)

    def receiving(self, peer: str, host: str) -> NixlReceiving:
        return NixlReceiving(self)

    def progress(self) -> None:
        self.agent.get_new_notifs()

    def close(self) -> None:
        for peer in list(self._peers):
            self._peers[peer] = 1
            self.leave(peer)
        for registration, _ in self._registered.values():
            with contextlib.suppress(Exception):
                self.agent.deregister_memory(registration)
        self._registered.clear()
        del self.agent

    def register(self, memory: Tensor) -> Any:
        """Register a slot's memory: once, and kept with the memory until `close`."""
        address = memory.data_ptr()
        if address not in self._registered:
            try:
                registration = self.agent.register_memory([(address, memory.numel(), self.index, "")], self.segment)
            except Exception as error:  # noqa: BLE001 - NIXL's errors have no other common class
                raise TransferError(f"NIXL cannot register a slot: {_text(error)}") from None
            self._registered[address] = (registration, memory)
        return self._registered[address][0]

    @property
    def index(self) -> int:
        return self.device.index or 0

    def leave(self, peer: str) -> None:
        """A connection to the peer is over."""
        self._peers[peer] -= 1
        if not self._peers[peer]:
            del self._peers[peer]
            with contextlib.suppress(Exception):  # nothing was ever written to it
                self.agent.remove_remote_agent(peer)


class NixlSending:
    def __init__(self, carrier: NixlCarrier, peer: str) -> None:
        self._carrier = carrier
        self._peer = peer

    def send(self, memory: Tensor, num_bytes: int, place: bytes) -> AsyncOperation:
        carrier, agent = self._carrier, self._carrier.agent
        carrier.register(memory)
        if len(place) < _PLACE.size:
            raise TransferError(f"a slot is named by {_PLACE.size} bytes or more, not {len(place)}")
        address, device = _PLACE.unpack_from(place)
        try:
            if metadata := place[_PLACE.size :]:
                agent.add_remote_agent(metadata)
            here = agent.get_xfer_descs([(memory.data_ptr(), num_bytes, carrier.index)], carrier.segment)
            there = agent.get_xfer_descs([(address, num_bytes, device)], carrier.segment)
            handle = agent.initialize_xfer("WRITE", here, there, self._peer)
            return _Write(agent, handle, agent.transfer(handle))
        except Exception as error:  # noqa: BLE001 - NIXL's errors have no other common class
            raise TransferError(f"NIXL cannot write: {_text(error)}") from None

    def reach(self, place: bytes, num_bytes: int, tag: int) -> RemoteSlot | None:
        return None

    def abort(self) -> None:
        """Nothing to do: a cancelled write could still land, so writes under way continue."""

    def close(self) -> None:
        self._carrier.leave(self._peer)


class NixlReceiving(OneSidedReceiving):
    def __init__(self, carrier: NixlCarrier) -> None:
        self._carrier = carrier
        self._announced: set[int] = set()  # addresses whose metadata the peer has

    def export_slot(self, memory: Tensor) -> bytes:
        registration, address = self._carrier.register(memory), memory.data_ptr()
        place = _PLACE.pack(address, self._carrier.index)
        if address in self._announced:
            return place
        self._announced.add(address)
        return place + bytes(self._carrier.agent.get_partial_agent_metadata(registration, True, ["UCX"]))


class _Write:
    def __init__(self, agent: Any, handle: Any, state: str) -> None:
        self._agent, self._handle = agent, handle
        self.error = ""
        self._over = False
        self._note(state)

    def query(self) -> bool:
        if not self._over:
            try:
                self._note(self._agent.check_xfer_state(self._handle))
            except Exception as error:  # noqa: BLE001 - NIXL's errors have no other common class
                self._note(_text(error))
        return self._over

    def _note(self, state: str) -> None:
        if state == "PROC":
            return
        self._over = True
        self.error = "" if state == "DONE" else f"NIXL: {state}"
        with contextlib.suppress(Exception):
            self._handle.release()


def _load() -> tuple[Any, str]:
    """The package, under its name for the installed CUDA version, and its version."""
    for name in NIXL_PACKAGES:
        with contextlib.suppress(ImportError):
            package = importlib.import_module(name)
            if "NIXL_LOG_LEVEL" not in os.environ:
                logging.getLogger("nixl").setLevel(logging.WARNING)  # importing it has set INFO, on stdout
            return package, importlib.metadata.version(name.replace("_", "-"))
    raise TransferError("NIXL is not installed: pip install 'baton-serve[nixl]'")


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
