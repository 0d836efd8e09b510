"""How fast a node works, learned from what its requests took."""

from __future__ import annotations

import math

PRIOR_S_PER_TOKEN = 1e-4
"""While nothing is known of any node: then all are alike, and the value hardly matters."""
PRIOR_S = 0.5
"""What a prompt may take, whatever was expected of it."""
FAMILIAR = 4.0
"""Lengths up to this many times the longest so far are expected to go on as before."""
FORGETTING = 1 / 32
"""Share by which the weight of earlier observations falls with each new one."""
FADING_S = 10.0
"""Without a new observation, a `FadingMean` falls to a third in this time."""
MOST_SURPRISE = 4.0
"""An observation counts as at most this many times what was expected: a prompt that waited for a compiler must not make
its node look slow for a minute. If the node has become slower for good, a few observations suffice. The very first one
of all nodes counts in full: nothing was known that it could surprise."""

_RIDGE = 1.0


class PrefillTime:
    """Seconds that a node takes for so many uncached tokens of prompts, one prompt after the other: a constant and a
    price for each token.

    It learns from the time between the ends of two prompts, and not from what each of them took: a node computes the
    end of one and the beginning of the next in one step, and both would count all of it. So two prompts may also end
    at once, the second one in no time.

    Prompts of about one length share a mean, and the line is fitted to the means, so that a hundred short prompts do
    not wipe out what a long one took. Prompts much longer than any so far are expected to be cheap: a node that looked
    too slow for them would get none, and nothing better would be learned of it.
    """

    def __init__(self, prior: PrefillTime | None = None) -> None:
        """`prior`: what is predicted before the first observation."""
        self._prior = prior
        self._means: dict[int, _Prompts] = {}  # by the bits of their number of tokens, two at a time
        self._longest = self._constant_s = self._s_per_token = 0.0

    def predict(self, num_tokens: int) -> float:
        if not num_tokens:
            return 0.0
        if not self._means:
            return self._prior.predict(num_tokens) if self._prior else num_tokens * PRIOR_S_PER_TOKEN
        familiar = FAMILIAR * self._longest
        if num_tokens <= familiar:
            return self._constant_s + self._s_per_token * num_tokens
        beyond_s = min(self._s_per_token, PRIOR_S_PER_TOKEN) * (num_tokens - familiar)
        return self._constant_s + self._s_per_token * familiar + beyond_s

    def learn(self, num_tokens: int, took_s: float) -> None:
        """Less than one token, or less than no time, teaches nothing."""
        if num_tokens < 1 or took_s < 0:
            return
        if self._means or self._prior:
            took_s = min(took_s, max(MOST_SURPRISE * self.predict(num_tokens), PRIOR_S))
        length = num_tokens.bit_length() // 2
        if length not in self._means:
            self._means[length] = _Prompts()
        self._means[length].add(num_tokens, took_s)
        self._longest = self._means[max(self._means)].num_tokens
        self._fit()

    def _fit(self) -> None:
        """The line with the least squares, neither part negative. What decides nothing falls to the tokens' price: the
        constant costs `_RIDGE`."""
        n = x = y = xx = xy = 0.0
        for mean in self._means.values():
            weight, tokens, seconds = mean.weight, mean.num_tokens, mean.seconds
            n, x, y = n + weight, x + weight * tokens, y + weight * seconds
            xx, xy = xx + weight * tokens * tokens, xy + weight * tokens * seconds
        constant_s = (y * xx - x * xy) / ((n + _RIDGE) * xx - x * x)
        self._constant_s = min(max(constant_s, 0.0), y / n)
        self._s_per_token = max((xy - self._constant_s * x) / xx, 0.0)


class _Prompts:
    """The means of what is known of prompts of about one length, in which older ones count less."""

    def __init__(self) -> None:
        self.weight = self.num_tokens = self.seconds = 0.0

    def add(self, num_tokens: int, took_s: float) -> None:
        self.weight = (1 - FORGETTING) * self.weight + 1
        self.num_tokens += (num_tokens - self.num_tokens) / self.weight
        self.seconds += (took_s - self.seconds) / self.weight


class Mean:
    """A mean in which older observations count less. Zero before the first."""

    def __init__(self) -> None:
        self.value = 0.0
        self._weight = 0.0

    def learn(self, observed: float) -> None:
        self._weight = (1 - FORGETTING) * self._weight + 1
        self.value += (observed - self.value) / self._weight


class FadingMean:
    """A mean that decides who is observed next: a node that looks slow gets no requests, and nothing better would be
    learned of it. So what is known falls towards zero in time, until the node is tried again, and what is then observed
    counts for the more. Times are those of the caller's clock."""

    def __init__(self) -> None:
        self._value = self._weight = self._learned_at = 0.0

    def learn(self, observed: float, now: float) -> None:
        silent_s = max(0.0, now - self._learned_at)
        self._weight = (1 - FORGETTING) * self._weight * math.exp(-silent_s / FADING_S) + 1
        self._value += (observed - self._value) / self._weight
        self._learned_at = now

    def at(self, now: float) -> float:
        silent_s = now - self._learned_at
        return self._value * math.exp(-silent_s / FADING_S) if self._value and silent_s > 0 else self._value
