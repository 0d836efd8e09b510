"""How fast a node works, learned from what its requests took."""

from __future__ import annotations

PRIOR_S_PER_TOKEN = 1e-4
"""While nothing is known of any node: then all are alike, and the value hardly matters."""
FORGETTING = 1 / 32
"""Share by which the weight of earlier observations falls with each new one."""
MOST_SURPRISE = 4.0
"""An observation counts as at most this many times what was expected: a prompt that waited for a compiler must not make
its node look slow for a minute. If the node has become slower for good, a few observations suffice."""


class PrefillTime:
    """Seconds that a node takes for so many uncached tokens of prompts, one prompt after the other.

    It learns from the time between the ends of two prompts, and not from what each of them took: a node computes the
    end of one and the beginning of the next in one step, and both would count all of it. So two prompts may also end
    at once, the second one in no time.
    """

    def __init__(self, prior: PrefillTime | None = None) -> None:
        """`prior`: what is predicted before the first observation."""
        self._prior = prior
        self._num_tokens = self._seconds = 0.0

    @property
    def s_per_token(self) -> float:
        if self._seconds:
            return self._seconds / self._num_tokens
        return self._prior.s_per_token if self._prior else PRIOR_S_PER_TOKEN

    def predict(self, num_tokens: int) -> float:
        return num_tokens * self.s_per_token

    def learn(self, num_tokens: int, took_s: float) -> None:
        """Less than one token, or less than no time, teaches nothing."""
        if num_tokens < 1 or took_s < 0:
            return
        if self._seconds:
            took_s = min(took_s, MOST_SURPRISE * self.predict(num_tokens))
        keep = 1 - FORGETTING
        self._num_tokens = keep * self._num_tokens + num_tokens
        self._seconds = keep * self._seconds + took_s


class Mean:
    """A mean in which older observations count less. Zero before the first."""

    def __init__(self) -> None:
        self.value = 0.0
        self._weight = 0.0

    def learn(self, observed: float) -> None:
        self._weight = (1 - FORGETTING) * self._weight + 1
        self.value += (observed - self.value) / self._weight
