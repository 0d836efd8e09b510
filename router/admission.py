"""Bounds what is in flight at once. A request's share is reserved before anything is built for it, and returned once,
at its end."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from baton.errors import BatonError, InvalidRequest, Overloaded


class Admission:
    """Counts everything that is admitted and keeps each count below its limit; a limit of 0 means no limit.

    `max_num_requests`: prompts in flight, or texts to tokenize. `max_num_tokens`: prompt tokens in flight. `on_refused`
    is called for each request that is refused for lack of room.
    """

    def __init__(
        self,
        max_num_requests: int = 0,
        max_num_tokens: int = 0,
        on_refused: Callable[[BatonError], None] = lambda error: None,
    ) -> None:
        self.num_requests = 0
        self.num_tokens = 0
        self._max_num_requests = max_num_requests
        self._max_num_tokens = max_num_tokens
        self._on_refused = on_refused

    def admit(self, num_requests: int, num_tokens: int) -> Admitted:
        """Reserve a share. `num_tokens` may be an estimate, see `Admitted.resize`. A request that is alone always gets
        its tokens.

        Raises Overloaded when there is no room now, InvalidRequest when there can never be.
        """
        limit = self._max_num_requests
        if limit and num_requests > limit:
            raise InvalidRequest(
                f"there are {num_requests} prompts, but at most {limit} can be in flight here (--max-num-requests)",
                "prompt",
            )
        if limit and self.num_requests + num_requests > limit:
            self._refuse(f"{self.num_requests} of {limit} requests are in flight (--max-num-requests)")
        limit = self._max_num_tokens
        if limit and self.num_tokens and self.num_tokens + num_tokens > limit:
            self._refuse(f"prompts of {self.num_tokens} of {limit} tokens are in flight (--max-num-prompt-tokens)")
        return Admitted(self, num_requests, num_tokens)

    def _refuse(self, message: str) -> None:
        error = Overloaded(message)
        self._on_refused(error)
        raise error


class Admitted:
    """One request's share, held until `release`, or until the end of the `with` block unless `keep` was called."""

    def __init__(self, admission: Admission, num_requests: int, num_tokens: int) -> None:
        self._admission = admission
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
        self._admission.num_requests -= self._num_requests
        self._num_requests = 0
        self.resize(0)

    def __enter__(self) -> Admitted:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self._kept:
            self.release()
