"""How long a step will take, learned from the steps that have ended.

A step's time is modelled as a constant, plus a price for each of its sequences, tokens of context, prompt tokens and
prompt pairs (`StepSize`). The prices minimise the squared relative errors, and none is negative: a larger step is never
predicted to be faster. Only sums over the steps are kept, in which older steps count less (recursive least squares with
forgetting; coordinate descent from the last prices finds the new ones). Steps with and without prompts have separate
sums, so that hours of decodes do not wipe out what is known about prompts.
"""

from __future__ import annotations

from dataclasses import astuple, replace

from engine.step_padding import UNPADDED, StepPadding
from engine.step_size import StepSize

FORGETTING = 1 / 64
"""The share by which each step lowers the weight of earlier steps of its kind."""
MOST_SURPRISE = 4.0
"""A step that took more than this many times its predicted time counts as this many times: one that waited for a
compiler must not make all others look slow. If steps have become slower for good, a few of them suffice."""
LEAST_SURPRISE = 0.5
"""Likewise, one that took less than this share of its predicted time counts as this share. A step looks short if the
end of the step before it was noticed late; and in relative errors, one that seems to take a hundredth of its time
outweighs ten thousand others."""
MARGIN = 2.0
"""Added to the prediction for a step with prompts: this many times the mean share by which such steps took longer than
predicted. Likewise subtracted where a step must not be predicted to be longer than it is."""
GROWTH = 2.0
"""The prices are trusted up to this many times the most prompt tokens in a recent step."""

_SCALES = (1.0, 16.0, 16_384.0, 512.0, 262_144.0)
"""Divisors of the features, which bring them to one magnitude."""
_RIDGE = 1e-6
_SWEEPS = 40
_SETTLED = 1e-5

Features = tuple[float, ...]


class StepTime:
    """Predicts the times of steps, in seconds. Memory is constant; learning costs some 10 us, the first prediction
    after it some 200.

    padding: to how many tokens the device pads a step with prompts.
    """

    def __init__(self, padding: StepPadding = UNPADDED) -> None:
        self._padding = padding
        self._sums = {False: _Sums(), True: _Sums()}  # by whether the steps have prompts
        self._prices = [0.0] * len(_SCALES)
        self._is_stale = False  # a step was learned since the prices were found
        self._excess = 0.0  # mean share by which steps with prompts took longer than predicted
        self._shortfall = 0.0  # the same for those that took less
        self._most_prompt_tokens = 0.0  # in a recent step
        self.launch_s = 0.0
        """The most time that the host recently took to launch a step with prompts op by op. 0: there was no such
        launch."""

    def learn_launch(self, size: StepSize, took_s: float) -> None:
        """Learn how long the host took to launch a step."""
        if size.has_prompts and self._padding.fitting(size.num_seqs - 1, size.num_prompt_tokens) is None:
            self.launch_s = max(took_s, self.launch_s + (took_s - self.launch_s) * 4 * FORGETTING)

    def learn(self, size: StepSize, took_s: float) -> None:
        """Learn from a step that has ended."""
        if took_s <= 0:
            return
        features = self._features(size)
        expected_s = self._price_of(features)  # at the last prediction's prices: finding new ones costs more
        if expected_s > 0 and self._sums[size.has_prompts].weight > 1:
            took_s = min(max(took_s, LEAST_SURPRISE * expected_s), MOST_SURPRISE * expected_s)
            if size.has_prompts:
                surprise = took_s / expected_s - 1
                self._excess += (max(surprise, 0.0) - self._excess) * 4 * FORGETTING
                self._shortfall += (max(-surprise, 0.0) - self._shortfall) * 4 * FORGETTING
        self._sums[size.has_prompts].add(tuple(feature / took_s for feature in features))
        if size.has_prompts:
            faded = self._most_prompt_tokens * (1 - FORGETTING)
            self._most_prompt_tokens = max(faded, float(size.num_prompt_tokens))
        self._is_stale = True

    def predict(self, size: StepSize) -> float | None:
        """A time that the step will usually not exceed. None: nothing is known of steps with so many prompt tokens."""
        expected_s = self._expect(size)
        return expected_s * (1 + MARGIN * self._excess) if expected_s and size.has_prompts else expected_s

    def predict_least(self, size: StepSize) -> float | None:
        """A time that the step will usually take at least. None: as for `predict`."""
        expected_s = self._expect(size)
        return expected_s * max(1 - MARGIN * self._shortfall, 0.0) if expected_s and size.has_prompts else expected_s

    def _expect(self, size: StepSize) -> float | None:
        if size.num_prompt_tokens > self.most_trusted_tokens:
            return None
        if self._is_stale:
            self._find_prices()
        return self._price_of(self._features(size))

    @property
    def most_trusted_tokens(self) -> int:
        """Prompt tokens in a step beyond which nothing is predicted. 0: no prompt was ever seen."""
        most = int(GROWTH * self._most_prompt_tokens)
        graph = self._padding.fitting(0, most) if most else None
        return graph[1] if graph else most

    def _features(self, size: StepSize) -> Features:
        if size.has_prompts:  # one of its sequences counts as the only prompt
            num_tokens = self._padding.padded(size.num_seqs - 1, size.num_prompt_tokens)
            size = replace(size, num_prompt_tokens=num_tokens)
        values: tuple[int, ...] = astuple(size)
        return tuple(value / scale for value, scale in zip((1, *values), _SCALES, strict=True))

    def _price_of(self, features: Features) -> float:
        return sum(price * feature for price, feature in zip(self._prices, features, strict=True))

    def _find_prices(self) -> None:
        """The prices, none negative, with the least squares of the relative errors: predicted / took is to be 1."""
        decodes, prompts = self._sums[False], self._sums[True]
        squares = [
            [a + b for a, b in zip(*rows, strict=True)] for rows in zip(decodes.squares, prompts.squares, strict=True)
        ]
        firsts = [a + b for a, b in zip(decodes.firsts, prompts.firsts, strict=True)]
        prices, order = self._prices, range(len(_SCALES))
        for _ in range(_SWEEPS):
            moved = 0.0
            for i in order:
                row = squares[i]
                if not row[i]:
                    continue
                rest = firsts[i] - sum(row[j] * prices[j] for j in order if j != i)
                price = max(rest / (row[i] * (1 + _RIDGE)), 0.0)
                moved = max(moved, abs(price - prices[i]) * row[i] ** 0.5)
                prices[i] = price
            if moved < _SETTLED:
                break
        self._is_stale = False


class _Sums:
    """What least squares need to know about steps of one kind: sums of features / time and of their products."""

    def __init__(self) -> None:
        num = len(_SCALES)
        self.weight = 0.0
        self.firsts = [0.0] * num
        self.squares = [[0.0] * num for _ in range(num)]

    def add(self, row: Features) -> None:
        kept = 1 - FORGETTING
        self.weight = self.weight * kept + 1
        for i, value in enumerate(row):
            self.firsts[i] = self.firsts[i] * kept + value
            squares = self.squares[i]
            for j, other in enumerate(row):
                squares[j] = squares[j] * kept + value * other
