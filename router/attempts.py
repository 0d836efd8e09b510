"""Which attempts at requests are on which nodes, and which wait for one: placed, fenced and forgotten here.

What an attempt's tokens mean for its request, and whether another one follows, is for `router.core` to say.
"""

from __future__ import annotations

from baton.errors import NodeUnavailable
from baton.messages import Abort, DecodeTarget, WorkId
from router.actions import Outbox
from router.life import RequestLife, Unplaced, Work, WorkState
from router.placement import Placement, Pool
from router.waiting import WaitingForNode


class Attempts:
    """Uses the pool's nodes, and tells them through `outbox`. Keeps `RequestLife.works` and `unplaced`, and of these
    lives what of their timings is about nodes. `max_waiting`: how many may wait for a node."""

    def __init__(self, epoch: int, pool: Pool, outbox: Outbox, max_waiting: int) -> None:
        self._epoch = epoch
        self._pool = pool
        self._outbox = outbox
        self._owner: dict[WorkId, RequestLife] = {}
        self._waiting = WaitingForNode(max_waiting)

    def find(self, work_id: WorkId, incarnation: str) -> tuple[RequestLife, Work] | None:
        """The live attempt of that name and its request, if it was placed on that node."""
        life = self._owner.get(work_id)
        if life is None:
            return None
        work = life.works[work_id]
        return (life, work) if incarnation in (work.prefill, work.decode) else None

    def states(self) -> list[WorkState]:
        """Of all live work, waiting or placed."""
        placed = [life.works[work_id].state for work_id, life in self._owner.items()]
        return placed + [WorkState.UNPLACED] * len(self._waiting)

    # ---- placing ----

    def place_or_wait(self, task: Unplaced, placement: Placement | None, now: float) -> None:
        """Raises NodeUnavailable when there is no place, nor one to wait."""
        if placement is None:
            self._waiting.add(task, self._pool.why_not_ready() or "no node")
        else:
            self._place(task, placement, now)

    def place_waiting(self, now: float) -> None:
        """A node has come: who waits for one is placed, in order of arrival."""
        for task in self._waiting.tasks():
            try:
                placement = self._pool.choose(task.life.avoid, now)
            except NodeUnavailable as misfit:  # a node that fits may come yet, and the request has a deadline
                task.error = misfit
                return
            if placement is None:
                return
            self._waiting.remove(task)
            self._place(task, placement, now)

    def stop_waiting(self, task: Unplaced) -> None:
        self._waiting.remove(task)

    def _place(self, task: Unplaced, placement: Placement, now: float) -> None:
        """Those of its samples that have not ended while it waited."""
        life, samples = task.life, [sample for sample in task.samples if not sample.ended]
        prefill, decode = placement.prefill.info, placement.decode.info if placement.decode else None
        work_id = WorkId(self._epoch, task.key, task.attempt)
        left_s = life.deadline - now
        work = Work(work_id, samples, prefill.incarnation, decode.incarnation if decode else None, left_s)
        life.works[work_id] = work
        self._owner[work_id] = life
        life.timings.num_attempts = max(life.timings.num_attempts, task.attempt + 1)
        life.timings.prefill_node, life.timings.decode_node = prefill.node_id, (decode or prefill).node_id
        self._pool.place(placement, len(life.request.prompt_tokens))
        target = DecodeTarget(decode.address, decode.incarnation) if decode else None
        self._outbox.to_node(work.prefill, life.prefill(work, target, now))

    # ---- progress, end ----

    def prefilled(self, life: RequestLife, work: Work) -> None:
        """Its prompt keeps nobody waiting any more. Once more does nothing."""
        if not work.prefilled:
            work.prefilled = True
            self._pool.prefilled(work.prefill, len(life.request.prompt_tokens))

    def abort(self, work: Work, samples: tuple[int, ...] = ()) -> None:
        """Tell all nodes that may still hold something of it; `samples`: that these alone are over."""
        for incarnation in work.nodes():
            self.abort_on(incarnation, work, samples)

    def abort_on(self, incarnation: str, work: Work, samples: tuple[int, ...] = ()) -> None:
        if self._pool.get(incarnation):
            self._outbox.to_node(incarnation, Abort(work.id, samples, work.deadline_s))

    def retire(self, life: RequestLife, work: Work) -> None:
        """It is over: nothing that a node says of it counts any more."""
        del life.works[work.id]
        del self._owner[work.id]
        self.prefilled(life, work)
        self._pool.ended(work.decode or work.prefill, len(life.request.prompt_tokens))
