"""How fast a node works, learned from what its requests took."""

from __future__ import annotations

PRIOR_S_PER_TOKEN = 1e-4
"""While nothing is known of any node: then all are alike, and the value hardly matters."""
FORGETTING = 1 / 32
"""Share by which the weight of earlier observations falls with each new one."""
MOST_SURPRISE = 4.0
"""An observation counts as at most this many times what was expected: a prompt that waited for a compiler must not make
its node look slow for a minute. If the node has become slower for good, a few observations suffice."""
_RIDGE = 1e-3


class PrefillTime:
    """Seconds from a prompt's first chunk to its first token: a constant plus a multiple of its uncached tokens, both
    fitted by least squares in which older observations count less. Neither is negative."""

    def __init__(self, prior: PrefillTime | None = None) -> None:
        """`prior`: what is predicted before the first observation."""
        self._prior = prior
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._constant_s = 0.0
        self._s_per_token = PRIOR_S_PER_TOKEN

    def predict(self, num_tokens: int) -> float:
        if self._prior is not None and not self._weight:
            return self._prior.predict(num_tokens)
        return self._constant_s + self._s_per_token * num_tokens

    def learn(self, num_tokens: int, took_s: float) -> None:
        if num_tokens <= 0 or took_s <= 0:
            return
        if self._weight > 1:
            took_s = min(took_s, MOST_SURPRISE * self.predict(num_tokens))
        x, keep = float(num_tokens), 1 - FORGETTING
        self._weight = keep * self._weight + 1
        self._x, self._y = keep * self._x + x, keep * self._y + took_s
        self._xx, self._xy = keep * self._xx + x * x, keep * self._xy + x * took_s
        self._fit()

    def _fit(self) -> None:
        """Of equally long prompts alone, the constant is zero."""
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x * mean_x
        if spread > _RIDGE * mean_x * mean_x:
            slope = (self._xy / self._weight - mean_x * mean_y) / spread
        else:
            slope = mean_y / mean_x
        self._s_per_token = min(max(slope, 0.0), mean_y / mean_x)
        self._constant_s = max(0.0, mean_y - self._s_per_token * mean_x)


class Mean:
    """A mean in which older observations count less. Zero before the first."""

    def __init__(self) -> None:
        self.value = 0.0
        self._weight = 0.0

    def learn(self, observed: float) -> None:
        self._weight = (1 - FORGETTING) * self._weight + 1
        self.value += (observed - self.value) / self._weight
