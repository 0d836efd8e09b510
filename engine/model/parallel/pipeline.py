"""The pipeline stages of a node's model, and what travels between them.

    rank = stage * size of a stage + number in the stage, as in Megatron-LM and vLLM

    stage 0 --hidden states--> stage 1 --hidden states--> ... last stage --wanted logits--> rank 0

Each rank sends its hidden states to the rank with the same number in the next stage. A send does not wait for the other
end, so a stage starts the next step while its tensors are still on their way.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from baton.layout import LayerKv
from engine.model.errors import UnsupportedModel
from engine.model.parallel.group import ONE_RANK, RankGroup
from engine.model.parallel.stages import Stage


class Pipeline:
    """One rank's place in the pipeline: its `stage`, and `peers`, the ranks that divide the stage's layers. everyone:
    all ranks of the node; all must make this call. One thread sends; another may receive. On GPUs, all transfers are
    queued on the current stream."""

    def __init__(self, everyone: RankGroup, num_stages: int) -> None:
        assert everyone.size % num_stages == 0
        self.everyone = everyone
        self._stage_size = everyone.size // num_stages
        self.stage = Stage(everyone.rank // self._stage_size, num_stages)
        self.peers = everyone.part(self._stage_size)
        self._on_the_way: deque[Callable[[], None]] = deque()
        if num_stages > 1:
            self._connect()

    def send_hidden(self, hidden: Tensor) -> None:
        """Send hidden states to the next stage. hidden: [num_tokens, hidden_size], which must not change any more."""
        self._send(hidden, self.everyone.rank + self._stage_size)

    def receive_hidden(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> Tensor:
        """Wait for the previous stage's hidden states: [num_tokens, hidden_size]."""
        hidden = torch.empty(num_tokens, hidden_size, dtype=dtype, device=self.everyone.device)
        self.everyone.receive(hidden, self.everyone.rank - self._stage_size)
        return hidden

    def send_logits(self, logits: Tensor) -> None:
        """Send logits to rank 0 from the first rank of the last stage. logits: [rows, vocab_size], which must not
        change any more; also without rows, since they say as well that the last stage is done with the step."""
        if self.peers.rank == 0:
            self._send(logits.float() if logits.numel() else logits.new_zeros(1, dtype=torch.float32), 0)

    def receive_logits(self, num_rows: int, vocab_size: int) -> Tensor:
        """On rank 0, wait for the last stage's logits: [num_rows, vocab_size], fp32."""
        shape = (num_rows, vocab_size) if num_rows else (1,)
        logits = torch.empty(shape, dtype=torch.float32, device=self.everyone.device)
        self.everyone.receive(logits, self.everyone.size - self._stage_size)
        return logits if num_rows else logits.new_empty(0, vocab_size)

    def follow_rank_0(self) -> None:
        """Order all work queued from now on after the work that rank 0 has queued, as receiving hidden states would."""
        if not self.stage.is_first:
            self.receive_hidden(1, 1, torch.float32)
        if not self.stage.is_last:
            self.send_hidden(torch.zeros(1, 1, dtype=torch.float32, device=self.everyone.device))

    def _send(self, x: Tensor, to: int) -> None:
        while len(self._on_the_way) >= self.stage.size:  # the oldest are of a retired step, or are scored logits
            self._on_the_way.popleft()()
        self._on_the_way.append(self.everyone.send(x, to))

    def _connect(self) -> None:
        """Send something over every connection, which makes it. NCCL then has its memory before the memory of a step is
        measured: that memory lowers what is free, and does not count towards the node's share of the GPU."""
        self.follow_rank_0()
        if self.stage.is_last:
            self.send_logits(torch.zeros(0, device=self.everyone.device))
        if self.everyone.rank == 0:
            self.receive_logits(0, 0)

    def kv_of_all(self, own: tuple[LayerKv, ...]) -> tuple[LayerKv, ...]:
        """The KV of the layers of all stages. own: of this stage's layers. All ranks must call. Raises UnsupportedModel
        if the stages' KV differs in more than the sliding window."""
        if self.stage.size == 1:
            return own
        alike = dataclasses.replace(own[0], sliding_window=None)
        form = zlib.crc32(repr(alike).encode())
        if self.everyone.minimum(form) != -self.everyone.minimum(-form):
            raise UnsupportedModel("the KV of different pipeline stages differs in shape")
        is_first = self.everyone.rank == self.stage.number * self._stage_size  # one rank of each stage adds to the sums
        num_layers = torch.zeros(self.stage.size, dtype=torch.int64)
        num_layers[self.stage.number] = len(own) * is_first
        num_layers = self.everyone.all_reduce(num_layers)
        first = int(num_layers[: self.stage.number].sum())
        windows = torch.zeros(int(num_layers.sum()), dtype=torch.int64)
        windows[first : first + len(own)] = torch.tensor([(layer.sliding_window or 0) * is_first for layer in own])
        windows = self.everyone.all_reduce(windows)
        return tuple(dataclasses.replace(alike, sliding_window=window or None) for window in windows.tolist())


class ProfilingPipeline(Pipeline):
    """A pipeline without its other stages, to profile the memory that a step takes: received tensors are random, and
    sent ones are kept for as long as sending would keep them."""

    def __init__(self, place: Pipeline) -> None:
        self.everyone, self.stage, self.peers = place.everyone, place.stage, place.peers
        self._stage_size = self.peers.size
        self._kept = deque[Tensor](maxlen=self.stage.size)

    def receive_hidden(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(num_tokens, hidden_size, dtype=dtype, device=self.everyone.device)

    def receive_logits(self, num_rows: int, vocab_size: int) -> Tensor:
        return torch.randn(num_rows, vocab_size, dtype=torch.float32, device=self.everyone.device)

    def _send(self, x: Tensor, to: int) -> None:
        self._kept.append(x)


ONE_STAGE = Pipeline(ONE_RANK, 1)
