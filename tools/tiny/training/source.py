"""Worker processes that build slabs while the model trains."""

from __future__ import annotations

import multiprocessing as mp
import time
from random import Random
from typing import Any

from tools.tiny.training.codec import Codec
from tools.tiny.training.settings import Settings
from tools.tiny.training.slabs import Slab, build_slab, draw_length, draw_row


def produce(queue: Any, progress: Any, codec: Codec, slab_tokens: int, max_length: int, seed: int) -> None:
    """The worker process: build slabs forever."""
    rng = Random(seed)
    while True:
        length = draw_length(rng, progress.value, max_length)
        queue.put(build_slab([draw_row(rng, codec, length) for _ in range(slab_tokens // length)], length))


class SlabSource:
    """Worker processes that keep a queue of slabs full."""

    def __init__(self, settings: Settings, codec: Codec) -> None:
        context = mp.get_context("fork")  # the workers inherit the codec and never touch CUDA
        self._queue = context.Queue(maxsize=6 * settings.slabs_per_step)
        self.progress = context.Value("d", 0.0)
        self.waited_s = 0.0
        self._workers = []
        for index in range(settings.num_workers):
            seed = settings.seed * 1000 + index
            args = (self._queue, self.progress, codec, settings.slab_tokens, settings.max_length, seed)
            worker = context.Process(target=produce, args=args, daemon=True)
            worker.start()
            self._workers.append(worker)

    def get(self, count: int) -> list[Slab]:
        """The next `count` slabs."""
        start = time.perf_counter()
        slabs = [self._queue.get(timeout=120) for _ in range(count)]
        self.waited_s += time.perf_counter() - start
        return slabs

    def close(self) -> None:
        """Terminate the workers."""
        for worker in self._workers:
            worker.terminate()
            worker.join()
