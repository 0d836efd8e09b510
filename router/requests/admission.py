"""Bounds what is in flight at once. A request's share is reserved before anything is built for it, and returned once,
at its end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import TracebackType

from baton.errors import BatonError, InvalidRequest, Overloaded
from router.placement.rates import Mean
from router.refusals import OnRefused, counted, uncounted

RETRY_AFTER_S = 1
"""How long a client should wait before it retries, when there was no room or no node."""
LONGEST_RETRY_AFTER_S = 60


class Full(Overloaded):
    """A limit is reached. `retry_after_s`: when there may be room again, in whole seconds."""

    def __init__(self, message: str, retry_after_s: int = RETRY_AFTER_S) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def retry_after_s(error: BatonError) -> int:
    """What to answer in `Retry-After` to a request that may be repeated."""
    return error.retry_after_s if isinstance(error, Full) else RETRY_AFTER_S


def room_after_s(missing_share: float, held_s: float) -> int:
    """When there may be room, in whole seconds, by Little's law: so much of what is there has to leave first, and stays
    for so long on average."""
    wait_s = math.ceil(min(missing_share, 1.0) * held_s)
    return min(max(wait_s, RETRY_AFTER_S), LONGEST_RETRY_AFTER_S)


class Admission:
    """Counts everything that is admitted and keeps each count below its limit; a limit of 0 means no limit.

    `max_num_requests`: prompts in flight, or texts to tokenize. `max_num_tokens`: prompt tokens in flight. `on_refused`
    is called for each request that is refused for lack of room or nodes, here or by others. `clock`: monotonic seconds.

    What is refused learns when to come again, by Little's law: if n shares are in flight and each is held for w seconds
    on average, n / w come free in a second.
    """

    def __init__(
        self,
        max_num_requests: int = 0,
        max_num_tokens: int = 0,
        on_refused: OnRefused = uncounted,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_requests = 0
        self.num_tokens = 0
        self._max_num_requests = max_num_requests
        self._max_num_tokens = max_num_tokens
        self.on_refused = on_refused
        self._clock = clock
        self._held_s = Mean()

    def admit(self, num_requests: int, num_tokens: int) -> Admitted:
        """Reserve a share. `num_tokens` may be an estimate, see `Admitted.resize`. A request that is alone always gets
        its tokens.

        Raises Full when there is no room now, InvalidRequest when there can never be.
        """
        limit = self._max_num_requests
        if limit and num_requests > limit:
            raise InvalidRequest(
                f"there are {num_requests} prompts, but at most {limit} can be in flight here (--max-num-requests)",
                "prompt",
            )
        if limit and self.num_requests + num_requests > limit:
            missing_share = (self.num_requests + num_requests - limit) / self.num_requests
            text = f"{self.num_requests} of {limit} requests are in flight (--max-num-requests)"
            raise self._full(text, missing_share)
        limit = self._max_num_tokens
        if limit and self.num_tokens and self.num_tokens + num_tokens > limit:
            missing_share = (self.num_tokens + num_tokens - limit) / self.num_tokens
            text = f"prompts of {self.num_tokens} of {limit} tokens are in flight (--max-num-prompt-tokens)"
            raise self._full(text, missing_share)
        return Admitted(self, num_requests, num_tokens, self._clock())

    def generated(self, since: float) -> None:
        """A generation is over that was admitted at `since`."""
        self._held_s.learn(self._clock() - since)

    def _full(self, message: str, missing_share: float) -> Full:
        """`missing_share`: how much of what is in flight has to end first."""
        return counted(Full(message, room_after_s(missing_share, self._held_s.value)), self.on_refused)


class Admitted:
    """One request's share, held until `release`, or until the end of the `with` block unless `keep` was called."""

    def __init__(self, admission: Admission, num_requests: int, num_tokens: int, since: float) -> None:
        self._admission = admission
        self._since = since
        self._num_requests = num_requests
        self._num_tokens = 0
        self._kept = False
        admission.num_requests += num_requests
        self.resize(num_tokens)

    def resize(self, num_tokens: int) -> None:
        """Replace the estimate by the real count. Never refused, since the work is done already."""
        self._admission.num_tokens += num_tokens - self._num_tokens
        self._num_tokens = num_tokens

    def keep(self) -> None:
        """Hold the share beyond the `with` block: the caller will call `release`."""
        self._kept = True

    def release(self) -> None:
        """Idempotent."""
        if self._kept and self._num_requests:
            self._admission.generated(self._since)
        self._admission.num_requests -= self._num_requests
        self._num_requests = 0
        self.resize(0)

    def __enter__(self) -> Admitted:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self._kept:
            self.release()
