"""From logits to tokens: what a request asked for, applied row by row, then one draw for all rows.

Per row, in vLLM's order: logprobs of the raw logits; logit_bias; EOS and stop ids forbidden while there are fewer than
min_tokens outputs; repetition, frequency and presence penalties; then the most likely token when greedy, else a draw
(see `baton_kernels.sampling`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.messages import TokenLogprobs
from baton.sampling import SamplingParams
from baton_kernels.sampling import DrawParams, sample
from engine.step import Choice

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy, as in vLLM: dividing by them would overflow."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """Choose the token after `tokens`, from row `row` of the logits, for answer `sample` of the request."""

    row: int
    sample: int
    params: SamplingParams
    tokens: Seq[int]
    num_prompt_tokens: int

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def greedy(self) -> bool:
        return self.params.temperature < GREEDY_BELOW

    @property
    def seed(self) -> int:
        """The 64 bits that, with the position, decide the draw; as a signed number."""
        seed = (self.params.seed + self.sample) % (1 << 64)
        return seed - (1 << 64) if seed >> 63 else seed


class Sampler:
    """Chooses tokens for a batch. Stateless but for the model's EOS ids."""

    def __init__(self, eos_token_ids: tuple[int, ...]) -> None:
        self._eos_token_ids = eos_token_ids

    def sample(self, logits: Tensor, requests: Seq[SampleRequest]) -> list[Choice]:
        """One Choice per request. logits: [num_rows, vocab_size], fp32, not changed; requests may share rows."""
        if not requests:
            return []
        rows = [request.row for request in requests]
        own = logits if rows == list(range(logits.shape[0])) else logits[rows]
        tokens = self._choose(self._adjust(own, requests), requests)
        logprobs = _logprobs(own, tokens, requests)
        return [Choice(token, told) for token, told in zip(tokens.tolist(), logprobs, strict=True)]

    def _adjust(self, logits: Tensor, requests: Seq[SampleRequest]) -> Tensor:
        """The logits after bias, masks and penalties; the same tensor when no request has any."""
        touched = [(i, request) for i, request in enumerate(requests) if self._is_adjusted(request)]
        if touched:
            logits = logits.clone()
        for i, request in touched:
            if bias := request.params.logit_bias:
                logits[i, list(bias)] += torch.tensor(list(bias.values()), device=logits.device)
            if forbidden := self._forbidden(request):
                logits[i, [token for token in forbidden if 0 <= token < logits.shape[1]]] = float("-inf")
            _penalize(logits[i], request)
        return logits

    def _is_adjusted(self, request: SampleRequest) -> bool:
        return bool(request.params.logit_bias or _is_penalized(request.params) or self._forbidden(request))

    def _forbidden(self, request: SampleRequest) -> list[int]:
        """The tokens that would end the sample too early."""
        params = request.params
        if request.num_output_tokens >= params.min_tokens:
            return []
        return [*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)]

    def _choose(self, logits: Tensor, requests: Seq[SampleRequest]) -> Tensor:
        """[num_requests], int64. No sort and no noise for greedy rows."""
        drawn = [i for i, request in enumerate(requests) if not request.greedy]
        if len(drawn) == len(requests):
            return _draw(logits, requests)
        tokens = logits.argmax(dim=-1)
        if drawn:
            tokens[drawn] = _draw(logits[drawn], [requests[i] for i in drawn])
        return tokens


def _draw(logits: Tensor, requests: Seq[SampleRequest]) -> Tensor:
    device, params = logits.device, [request.params for request in requests]
    draw = DrawParams(
        temperature=torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device),
        top_k=torch.tensor([p.top_k for p in params], dtype=torch.int64, device=device),
        top_p=torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device),
        min_p=torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device),
        seed=torch.tensor([request.seed for request in requests], dtype=torch.int64, device=device),
        position=torch.tensor([len(request.tokens) for request in requests], dtype=torch.int64, device=device),
    )
    unbounded = any(p.top_p < 1.0 and not p.top_k for p in params)
    return sample(logits, draw, num_ordered=logits.shape[1] if unbounded else max(p.top_k for p in params))


def _is_penalized(params: SamplingParams) -> bool:
    return bool(params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty)


def _penalize(logits: Tensor, request: SampleRequest) -> None:
    """Change one row, [vocab_size], in place: repetition counts prompt and output, the other two the output alone."""
    params = request.params
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(request.tokens, device=logits.device)  # one token twice gets the same value twice
        old = logits[seen]
        logits[seen] = torch.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
    output = request.tokens[request.num_prompt_tokens :]
    if output and (params.frequency_penalty or params.presence_penalty):
        counts = Counter(output)
        less = [params.frequency_penalty * count + params.presence_penalty for count in counts.values()]
        logits[list(counts)] -= torch.tensor(less, device=logits.device)


def _logprobs(logits: Tensor, tokens: Tensor, requests: Seq[SampleRequest]) -> list[TokenLogprobs | None]:
    """Per request the chosen token's logprob and the most likely ones, where asked for."""
    told: list[TokenLogprobs | None] = [None] * len(requests)
    asked = [i for i, request in enumerate(requests) if request.params.num_logprobs >= 0]
    if not asked:
        return told
    logprobs = logits[asked].log_softmax(dim=-1)
    chosen = logprobs.gather(1, tokens[asked, None])[:, 0].tolist()
    width = min(max(requests[i].params.num_logprobs for i in asked), logits.shape[1])
    values, ids = (x.tolist() for x in logprobs.topk(width, dim=-1))
    for row, i in enumerate(asked):
        top = list(zip(ids[row], values[row], strict=True))[: requests[i].params.num_logprobs]
        told[i] = TokenLogprobs(chosen[row], tuple(top))
    return told
