"""The bar of a call with many prompts."""

from __future__ import annotations

import time
from typing import Any

from tqdm.auto import tqdm

from baton.errors import BatonError
from baton_llm.outputs import RequestOutput


class _Bar(tqdm):  # type: ignore[misc]
    monitor_interval = 0  # tqdm's monitor is a thread that stays


class Progress:
    """One step for each prompt; with `shown` false, nothing is written."""

    def __init__(self, num_prompts: int, shown: bool) -> None:
        self._bar: Any = _Bar(total=num_prompts, desc="Processed prompts", dynamic_ncols=True) if shown else None
        self._began = time.monotonic()
        self._num_input = self._num_output = 0

    def step(self, result: RequestOutput | BatonError) -> None:
        if self._bar is None:
            return
        if isinstance(result, RequestOutput):
            self._num_input += len(result.prompt_token_ids)
            self._num_output += sum(len(answer.token_ids) for answer in result.outputs)
        seconds = max(time.monotonic() - self._began, 1e-6)
        input_speed, output_speed = self._num_input / seconds, self._num_output / seconds
        speed = f"est. speed input: {input_speed:.2f} toks/s, output: {output_speed:.2f} toks/s"
        self._bar.set_postfix_str(speed, refresh=False)
        self._bar.update(1)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
