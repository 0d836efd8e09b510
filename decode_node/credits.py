"""The credits of leases: each is a slot with a posted receive, for which the prefill node may send one more part."""

from __future__ import annotations

from baton.handoff_messages import Credit
from decode_node.leases import Lease
from kv_transfer.ranks import ReceiverRanks
from node.outbox import Outbox

MIN_OPEN_PARTS = 2
"""A lease may always hold this many slots, even if few are free. Beyond that, it may hold as many as are still free, so
a single prompt gets half of all slots, and a slow one does not starve the others (the dynamic threshold of Choudhury
and Hahne, 1998)."""


class LeaseCredits:
    """Posts receives into the receiver's slots, for each lease in the order of its parts: the first with its Grant, and
    the others when slots are free, which it tells the prefill node through `outbox`."""

    def __init__(self, receiver: ReceiverRanks, outbox: Outbox) -> None:
        self._receiver = receiver
        self._outbox = outbox
        self._short: dict[int, Lease] = {}  # by serial: leases with parts for which no receive is posted
        self._may_post = False  # whether a part has landed, or receives were put off, since slots were last shared out
        self._num_freed_slots = 0  # when slots were last shared out

    def begin(self, lease: Lease, is_put_off: bool) -> None:
        """Post the receives that the lease's Grant announces. is_put_off: only as many as a lease may always hold; the
        others follow with the next `share`."""
        self._short[lease.serial] = lease
        with self._receiver.batched():
            self._post(lease, MIN_OPEN_PARTS if is_put_off else lease.num_parts)
        self._may_post |= is_put_off

    def part_landed(self) -> None:
        """A lease has one open part less."""
        self._may_post = True

    def end(self, lease: Lease) -> None:
        """Post nothing more for the lease."""
        self._short.pop(lease.serial, None)

    def share(self) -> None:
        """Post receives for leases that are short of slots, if parts have landed or slots were freed since."""
        if not self._short:
            return
        # The number of freed slots, since that of free ones stays the same if as many were taken. Read first, since
        # slots may be freed meanwhile.
        num_freed = self._receiver.num_freed_slots
        if not self._may_post and num_freed == self._num_freed_slots:
            return
        with self._receiver.batched():
            for lease in list(self._short.values()):
                if self._post(lease, lease.num_parts):
                    self._outbox.to_prefill(lease.peer, Credit(lease.serial, lease.credits))
        self._may_post, self._num_freed_slots = False, num_freed

    def _post(self, lease: Lease, at_most: int) -> bool:
        """Post receives into free slots, in the order of parts. True: the lease has more credits than before."""
        before, num_free = lease.credits, self._receiver.num_free_slots
        until = min(lease.num_parts, before + at_most)
        while lease.credits < until and lease.num_open < max(MIN_OPEN_PARTS, num_free):
            if not self._expect_next(lease):
                break
            num_free -= 1
        if lease.credits == lease.num_parts:
            del self._short[lease.serial]
        return lease.credits > before

    def _expect_next(self, lease: Lease) -> bool:
        """Post the receive for the part after those with credits. False: no slot is free."""
        number, part = lease.credits, lease.parts[lease.credits]
        where = part, lease.blocks_of(part), lease.marks
        # A long lease's parts arrive while its prompt is computed, so nothing waits for them and they need no upload in
        # advance.
        uploads, is_last = not lease.is_long, lease.is_last_of_rank(number)
        posted = self._receiver.expect(lease.peer, lease.serial, number, *where, is_last, uploads)
        lease.credits += posted
        return posted
