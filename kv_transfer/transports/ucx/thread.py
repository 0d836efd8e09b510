"""The thread that owns all UCX objects: context, worker, endpoints, requests.

It sleeps in epoll on the worker's descriptor and on one of its own, so it costs nothing while idle and reacts within
tens of microseconds; no other thread of this process calls UCX. It uses the low-level objects of `ucxx` rather than its
asyncio interface, which ends a request for the caller before it is over for UCX (it cancels dropped requests), so that
bytes may arrive late, and which would need one more thread.
"""

from __future__ import annotations

import ctypes
import logging
import select
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from ucxx._lib import libucxx as ucx
from ucxx._lib.arr import Array

from baton.errors import TransferError
from kv_transfer.events import EventQueue
from kv_transfer.staging import Staging
from kv_transfer.transport import MAX_HEADER_BYTES, TAG_BITS, Arrived, Failed, PeerDisconnected, Sent
from kv_transfer.transports.threaded import TransportThread, resolve
from kv_transfer.transports.ucx.buffer import buffer_of
from kv_transfer.transports.ucx.path import look, path_of, slowness

log = logging.getLogger(__name__)

_HEADER_TAG = 1 << (TAG_BITS + 1)
"""Combined with the tag of the message that the header belongs to."""
_HELLO_TAG = 1 << TAG_BITS
_HELLO_BYTES = 16 << 10
"""Large enough to need an answer (UCX sends 8 KiB and more by rendezvous), so once it is sent, the peer is alive and
both sides have completed the handshake. Without that, UCX does not notice the death of a peer that a part waits for."""
_BURST = 64
"""Progress calls between two checks of commands and completions: one call moves up to a few hundred KiB."""
_CLOSE_NS = 10**9
_FINISH_S = 1.0
"""How long shutdown waits for partly sent messages."""


@dataclass(eq=False, slots=True)
class Operation:
    """A push or an expect under way: a header, which is a message of its own preceded by its length, and the slot's
    bytes. UCX uses `buffers` until all `requests` are completed: then the operation is over, failed or not. One that is
    abandoned earlier keeps them alive, and the slot's retired memory keeps the operation (`Staging.renew`)."""

    tag: int
    slot: int
    is_push: bool
    buffers: tuple[Any, Any]
    requests: list[Any] = field(default_factory=list)
    error: str = ""
    """If not all requests were started, the reason."""

    @property
    def is_over(self) -> bool:
        return all(request.completed for request in self.requests)

    @property
    def header(self) -> bytes:
        text = self.buffers[0].obj
        return bytes(text[1 : 1 + text[0]])


@dataclass(eq=False, slots=True)
class Link:
    """A peer's endpoint. `hello` is sent first: once it is complete, the peer is connected.

    An endpoint is closed only when it is not sending, or has failed. Closing one in mid-send over TCP, while the peer
    closes its own, corrupts UCX 1.21's memory: the process dies soon after. So a link that is disconnected in mid-send
    is parked: its slots already have other memory, and the sends continue from the old memory until UCX has completed
    them or the peer is gone. Meanwhile the peer may be reconnected through another endpoint.
    """

    peer: str
    address: bytes
    same_host: bool
    endpoint: Any
    hello: Any
    waiting: list[Future[None]] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    lost: bool = False

    @property
    def is_sending(self) -> bool:
        return not (self.hello.completed and all(o.is_over for o in self.operations if o.is_push))

    def closed(self) -> None:
        """UCX's close callback: the peer is gone. It runs within `progress`, so it only sets a flag."""
        self.lost = True


class UcxThread(TransportThread):
    """`start` returns the worker's address."""

    def __init__(
        self,
        staging: Staging,
        options: dict[str, str],
        interface: str | None,
        events: EventQueue,
    ) -> None:
        super().__init__("ucx", events)
        self._staging = staging
        self._options = options
        self._interface = interface  # must exist
        self._links: dict[str, Link] = {}
        self._parked: list[Link] = []  # disconnected, with sends that UCX has not completed
        self._refused: list[Any] = []  # requests that UCX has not completed

    # ---- commands: on the thread ----

    def connect(self, peer: str, address: bytes, same_host: bool, up: Future[None]) -> None:
        """Resolve `up` once the peer can be reached. same_host: it is on this machine."""
        link = self._links.get(peer)
        if self._mailbox.is_closed or self._stopping:
            resolve(up, TransferError("the transport is closed"))
        elif link is not None and link.address != address:
            resolve(up, TransferError(f"{peer} is connected at another address"))
        elif link is not None and not link.waiting:
            resolve(up, None)
        elif link is not None:
            link.waiting.append(up)
        else:
            self._open_link(peer, address, same_host, up)

    def disconnect(self, peer: str) -> None:
        if link := self._links.get(peer):
            self._drop(link, "disconnected", requested=True)

    def push(self, peer: str, tag: int, slot: int, num_bytes: int, header: bytes) -> None:
        self._submit(peer, tag, slot, num_bytes, bytes((len(header),)) + header)

    def expect(self, peer: str, tag: int, slot: int, num_bytes: int) -> None:
        self._submit(peer, tag, slot, num_bytes, None)

    # ---- the thread ----

    def _open(self) -> bytes:
        if self._staging.device.type == "cuda":
            torch.cuda.set_device(self._staging.device)
            torch.cuda.current_stream().synchronize()  # makes the device's context current on this thread
        context = ucx.UCXContext(self._options)
        _require_devices(self._interface or "", context.info)
        self._machine = look(self._staging.device.type == "cuda", self._staging.is_exportable, context.info)
        log.debug("ucx options=%s %s", self._options, self._machine)
        self._worker = ucx.UCXWorker(context)
        self._worker.init_blocking_progress_mode()
        self._poll = select.epoll()
        self._poll.register(self._worker.epoll_file_descriptor, select.EPOLLIN)
        self._poll.register(self._mailbox, select.EPOLLIN)
        self._hello = np.zeros(_HELLO_BYTES, dtype=np.uint8)
        self._scrap = np.zeros(1, dtype=np.uint8)
        return bytes(self._worker.address.tobytes())

    def _turn(self) -> None:
        self._mailbox.run()
        for _ in range(_BURST):
            if not self._worker.progress_once():
                break
        for link in list(self._links.values()):
            self._collect(link)
            if link.lost:
                self._drop(link, "the peer is gone", requested=False)
        self._close_parked()
        self._refuse(_HELLO_TAG, ucx.UCXXTagMaskFull)
        self._deliver()
        if not self._mailbox and not self._stopping and self._worker.arm():
            self._poll.poll()

    # ---- links ----

    def _open_link(self, peer: str, address: bytes, same_host: bool, up: Future[None]) -> None:
        try:
            target = ucx.UCXAddress.create_from_buffer(address)
            endpoint = ucx.UCXEndpoint.create_from_worker_address(self._worker, target, True)
            hello = endpoint.tag_send(Array(self._hello), ucx.UCXXTag(_HELLO_TAG))
        except ucx.UCXError as error:
            resolve(up, TransferError(f"{peer} cannot be reached: {error}"))
            return
        link = Link(peer, address, same_host, endpoint, hello, [up])
        endpoint.set_close_callback(link.closed)
        self._links[peer] = link

    def _collect(self, link: Link) -> None:
        """Report completed operations."""
        if link.waiting and link.hello.completed:
            if reason := _error(link.hello):
                self._drop(link, reason, requested=True)
                return
            self._tell_path(link)
            for up in link.waiting:
                resolve(up, None)
            link.waiting = []
        for operation in [o for o in link.operations if o.is_over]:
            link.operations.remove(operation)
            if reason := operation.error or next(filter(None, map(_error, operation.requests)), ""):
                self._fail(link.peer, operation, reason)
            elif operation.is_push:
                self._emit(Sent(link.peer, operation.tag, operation.slot))
            else:
                self._emit(Arrived(link.peer, operation.tag, operation.slot, operation.header))

    def _tell_path(self, link: Link) -> None:
        """Log the path that UCX chose and, if it is slow, the reason, which UCX's own output does not make obvious."""
        path = path_of(link.endpoint.handle)
        log.info("kv path peer=%s path=%s", link.peer, ",".join(path))
        if reason := slowness(self._machine, path, link.same_host):
            log.warning("kv goes a slow way peer=%s path=%s reason=%s", link.peer, ",".join(path), reason)

    def _submit(self, peer: str, tag: int, slot: int, num_bytes: int, header: bytes | None) -> None:
        """header: of a push, preceded by its length. None: an expect."""
        link = self._links.get(peer)
        if link is None:
            self._emit(Failed(peer, tag, slot, "not connected"))
            return
        payload = buffer_of(self._staging.memory(slot), num_bytes)
        head = Array(bytearray(1 + MAX_HEADER_BYTES) if header is None else header)
        operation = Operation(tag, slot, header is not None, (head, payload))
        link.operations.append(operation)
        verb = link.endpoint.tag_send if operation.is_push else link.endpoint.tag_recv
        try:
            for buffer, its_tag in ((head, _HEADER_TAG | tag), (payload, tag)):
                operation.requests.append(verb(buffer, ucx.UCXXTag(its_tag)))
        except ucx.UCXError as error:
            operation.error = str(error)
            self._drop(link, operation.error, requested=False)  # the peer may have received half of it

    def _fail(self, peer: str, operation: Operation, reason: str) -> None:
        self._staging.renew(operation.slot, lambda: operation.is_over)
        self._emit(Failed(peer, operation.tag, operation.slot, reason))

    def _drop(self, link: Link, reason: str, requested: bool) -> None:
        """End all operations with the peer. `requested`: by this end, so no PeerDisconnected."""
        if self._links.pop(link.peer, None) is not link:
            return
        self._collect(link)  # completed operations are reported as such
        if link.lost or not link.is_sending:
            _close_endpoint(link)
        else:
            self._parked.append(link)
        for operation in link.operations:
            self._fail(link.peer, operation, reason)
        connecting = bool(link.waiting)
        for up in link.waiting:
            resolve(up, TransferError(f"{link.peer} cannot be reached: {reason}"))
        if not requested and not connecting:
            self._emit(PeerDisconnected(link.peer, reason))

    def _close_parked(self) -> None:
        for link in [x for x in self._parked if x.lost or not x.is_sending]:
            self._parked.remove(link)
            _close_endpoint(link)

    def _refuse(self, tag: int, mask: Any) -> None:
        """Receive messages without a posted receive into too small a buffer, which ends each of them at once for both
        sides. To receive one in full would mean to wait for its sender, which may hang."""
        self._refused = [request for request in self._refused if not request.completed]
        while message := self._worker.tag_probe(ucx.UCXXTag(tag), mask, remove=True):
            self._refused.append(self._worker.tag_recv_with_handle(Array(self._scrap), message))

    # ---- the end ----

    def _shut(self, reason: str, requested: bool) -> None:
        for link in list(self._links.values()):
            self._drop(link, reason, requested)
        self._worker.cancel_inflight_requests()
        deadline = time.monotonic() + _FINISH_S
        while self._parked and (left := deadline - time.monotonic()) > 0:
            self._worker.progress()
            self._close_parked()
            if self._parked and self._worker.arm():
                self._poll.poll(left)
        if self._parked:
            _keep_forever(self._worker, self._parked)
        self._refuse(0, ucx.UCXXTagMask(0))  # or ucxx, before it frees the worker, would receive all of it in full
        self._worker.progress()
        self._poll.close()
        del self._refused, self._worker
        self._staging.forget_retired()


def _close_endpoint(link: Link) -> None:
    link.endpoint.remove_close_callback()
    link.endpoint.close_blocking(period=_CLOSE_NS, max_attempts=1)
    link.endpoint = link.hello = None  # the close callback refers to the link: this cycle would keep the worker alive


def _keep_forever(*things: object) -> None:
    """Keep destructors from running, even at exit: they would close endpoints that are sending."""
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _require_devices(wanted: str, resources: str) -> None:
    """Raise TransferError for a missing device: UCX only warns, and goes on without it."""
    for name in filter(None, wanted.split(",")):
        if name != "all" and not name.startswith("^") and f"/{name}" not in resources:
            raise TransferError(f"there is no network interface {name}, or UCX cannot use it")


def _error(request: Any) -> str:
    """The error of a completed request; empty if it succeeded."""
    try:
        request.check_error()
    except ucx.UCXError as error:
        return str(error) or type(error).__name__
    return ""
