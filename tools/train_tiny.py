"""Train baton-tiny, the small Llama checkpoint that ships with the repository, on generated data alone.

    python tools/train_tiny.py --out engine/checkpoints/baton-tiny --minutes 8     # one GPU
    python tools/train_tiny.py --out /tmp/baton-tiny --smoke                       # a minute on a CPU
    python tools/train_tiny.py --out engine/checkpoints/baton-tiny --eval-only     # measure, and write the card

It trains a byte-level BPE tokenizer on the tasks of `tiny_tasks`, then the model, then measures the saved weights
(rounded to bf16, computed in fp32, as they are run) by greedy generation on held-out prompts, and writes the card.

A batch is a flat run of tokens made of slabs: a slab is [rows, length] samples of one length, so a row holds one
chat or text from position 0, and nothing attends across rows. Everything but attention is compiled once for the
fixed number of tokens (the idea of vLLM's flattened batch); attention runs over each slab. Worker processes make the
slabs, so the GPU does not wait for data.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing as mp
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the workers are forked, and each needs one thread only
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import numpy as np
import tiny_tasks as tasks
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, BOS, EOT, IM_START, IM_END = range(5)
SPECIAL_TOKENS = ["<|pad|>", "<|bos|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB_SIZE = 4096
MAX_LENGTH = 4096
HEAD_DIM = 32

# 100,000 and not 10,000: with 32 dimensions a head, it leaves five pairs of them, not two, that turn less than a
# quarter over 4,096 positions and so can match content at any distance.
ROPE_THETA = 100_000.0

# The share of the training tokens in rows of each length, once the curriculum has reached that length.
LENGTH_SHARES = {64: 0.03, 128: 0.15, 256: 0.20, 512: 0.18, 1024: 0.13, 2048: 0.12, 4096: 0.19}
CURRICULUM = ((0.06, 512), (0.15, 1024), (0.28, 2048))  # (until this progress, rows no longer than this)

PROMPT_LOSS = 0.1  # of the loss on answers; enough to learn the language, too little to crowd out the tasks
LONG_ANSWER_WEIGHT = 3  # a row of 1,024 tokens or more has few answers; each counts for this many

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role not in ['system', 'user', 'assistant'] %}
{{- raise_exception('Unknown role: ' ~ message.role) }}
{%- endif %}
{{- '<|im_start|>' ~ message.role ~ '\\n' }}
{%- if message.content is string %}
{{- message.content }}
{%- else %}
{%- for part in message.content %}
{{- part.text }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


@dataclass(frozen=True)
class Settings:
    """What a run does; `smoke` swaps in figures that a CPU manages in a minute."""

    out: Path
    minutes: float
    steps: int
    seed: int
    device: torch.device
    compiled: bool
    resume: Path | None
    peak_lr: float
    num_workers: int
    slab_tokens: int
    slabs_per_step: int
    max_length: int
    eval_prompts: int
    eval_rows: tuple[str, ...]
    save_every_s: float
    card_date: str

    @property
    def dtype(self) -> torch.dtype:
        """What matrix products compute in; the master weights are fp32 everywhere."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32


def corpus(seed: int, num_chats: int) -> Iterator[str]:
    """Text to train the tokenizer on: the tasks, names that no list holds, and everyday English words."""
    rng = Random(seed)
    for _ in range(num_chats):
        make = rng.choice((tasks.task_chat, tasks.document_chat, tasks.chunked_chat))
        yield "\n".join(message["content"] for message in make(rng, 400, "train"))
        yield " ".join(tasks.invented_name(rng) for _ in range(3))
    words = [*tasks.COMMON, *tasks.WORDS, *tasks.ADJECTIVES, "system", "user", "assistant"]
    for word in words:
        yield f" {word}" * 40
        yield f"{word}\n{word.capitalize()}\n" * 10


def build_tokenizer(seed: int, num_chats: int = 6000) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most 4,096 tokens in which every digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    cuts = Regex(r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(cuts, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(seed, num_chats), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", BOS)]
    )
    make: Any = PreTrainedTokenizerFast  # untyped in transformers
    wrapped: PreTrainedTokenizerFast = make(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|endoftext|>", "<|im_start|>"],
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
    )
    return wrapped


class Codec:
    """Turns text into token ids at about a million tokens a second, by remembering every piece it has met.

    The tokenizer never merges across the cuts of its pre-tokeniser, so encoding the pieces one by one gives the ids
    of the whole; `verify` holds it to that.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._pieces: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """The token ids of ASCII `text`, without special tokens."""
        ids: list[int] = []
        known = self._pieces
        for piece in tasks.PIECE.findall(text):
            found = known.get(piece)
            if found is None:
                found = known[piece] = self._tokenizer.encode(piece, add_special_tokens=False)
            ids += found
        return ids

    def message(self, message: tasks.Message) -> tuple[list[int], list[int]]:
        """One chat message as the template writes it: what comes before its content, and the content to <|im_end|>."""
        header = [IM_START, *self.encode(message["role"]), *self.encode("\n")]
        return header, [*self.encode(message["content"]), IM_END]

    def verify(self, seed: int) -> None:
        """Raise if a chat encoded here differs from what the tokenizer's own template gives."""
        for index in range(20):
            chat = tasks.task_chat(Random(seed + index), 300)
            ids, _ = encode_chat(self, chat, 10**9, 1)
            want = self._tokenizer.apply_chat_template(chat, return_dict=False)
            if ids != list(want)[: len(ids)] or len(want) - len(ids) > 1:
                raise RuntimeError("the codec and the tokenizer's chat template disagree")


@dataclass(frozen=True)
class Slab:
    """Rows of one length, flattened: tokens and targets [rows * length] uint16, codes [rows * length] uint8.

    A code says what a target counts for: 0 nothing (padding), 1 prompt, 1 + n an answer of weight n.
    """

    length: int
    tokens: np.ndarray
    targets: np.ndarray
    codes: np.ndarray


def encode_chat(codec: Codec, chat: Sequence[tasks.Message], limit: int, weight: int) -> tuple[list[int], list[int]]:
    """The ids and codes of as many whole exchanges of `chat` as fit `limit` tokens (none may)."""
    ids, codes, kept = [BOS], [1], 0
    newline = codec.encode("\n")
    for message in chat:
        header, content = codec.message(message)
        answer = message["role"] == "assistant"
        ids += header + content
        codes += [1] * len(header) + [1 + weight if answer else 1] * len(content)
        if len(ids) > limit:
            break
        if answer:
            kept = len(ids)
        ids += newline
        codes += [1] * len(newline)
    return ids[:kept], codes[:kept]


def encode_sample(codec: Codec, sample: tasks.Sample) -> tuple[list[int], list[int]]:
    """The ids of a whole sample, with codes that count its last answer only."""
    if not sample.plain:
        chat = [*sample.messages, {"role": "assistant", "content": sample.answer}]
        ids, _ = encode_chat(codec, chat, 10**9, 1)
        num_answer = len(codec.encode(sample.answer)) + 1
    else:
        answer = [*codec.encode(sample.answer), EOT]
        ids, num_answer = [BOS, *codec.encode(sample.prompt), *answer], len(answer)
    return ids, [1] * (len(ids) - num_answer) + [2] * num_answer


def draw_chat(rng: Random, length: int) -> list[tasks.Message]:
    """A chat for a row of `length` tokens: the longer the row, the more of them are about long texts."""
    draw = rng.random()
    if length <= 128:
        return tasks.task_chat(rng, int(length * rng.random()))
    share_of_tasks = 0.6 if length <= 512 else 0.25
    if draw < share_of_tasks:
        return tasks.task_chat(rng, length)
    if draw < share_of_tasks + (1 - share_of_tasks) * 0.65:
        return tasks.document_chat(rng, length)
    return tasks.chunked_chat(rng, length)


def draw_row(rng: Random, codec: Codec, length: int) -> tuple[list[int], list[int]]:
    """One training row of at most `length` tokens."""
    weight = LONG_ANSWER_WEIGHT if length >= 1024 else 1
    share_of_plain = 0.3 if length <= 128 else 0.06
    while True:
        if rng.random() < share_of_plain:
            ids, codes = encode_sample(codec, tasks.plain_task(rng, length))
            codes = [1 + weight if code == 2 else code for code in codes]
        else:
            ids, codes = encode_chat(codec, draw_chat(rng, length), length, weight)
        if 0 < len(ids) <= length:
            return ids, codes


def build_slab(rows: Sequence[tuple[list[int], list[int]]], length: int) -> Slab:
    """Pad rows of (ids, codes) to `length` and shift the targets by one."""
    tokens = np.zeros((len(rows), length + 1), np.uint16)
    codes = np.zeros((len(rows), length + 1), np.uint8)
    for index, (ids, row_codes) in enumerate(rows):
        tokens[index, : len(ids)] = ids
        codes[index, : len(ids)] = row_codes
    return Slab(length, tokens[:, :-1].ravel(), tokens[:, 1:].ravel(), codes[:, 1:].ravel())


def draw_length(rng: Random, progress: float, max_length: int) -> int:
    """The length of a slab's rows at this point of the curriculum."""
    limit = min([max_length, *(longest for until, longest in CURRICULUM if progress < until)])
    lengths = [length for length in LENGTH_SHARES if length <= limit]
    return rng.choices(lengths, [LENGTH_SHARES[length] for length in lengths])[0]


def produce(queue: Any, progress: Any, codec: Codec, slab_tokens: int, max_length: int, seed: int) -> None:
    """Make slabs for ever (a worker process)."""
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
        """End the workers."""
        for worker in self._workers:
            worker.terminate()
            worker.join()


def model_config() -> LlamaConfig:
    """The architecture of baton-tiny."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_LENGTH,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=[IM_END, EOT],
        pad_token_id=PAD,
    )


def new_model(seed: int) -> LlamaForCausalLM:
    """A fresh model; the projections into the residual stream start smaller, by the depth (GPT-2's rule)."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(model_config())
    scale = 1 / math.sqrt(2 * model.config.num_hidden_layers)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(scale)
            layer.mlp.down_proj.weight.mul_(scale)
    return model


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Llama's norm, in fp32."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on x [num_tokens, heads, head_dim], with cos and sin [num_tokens, 1, head_dim]."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def before_attention(
    x: Tensor, norm: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """x [num_tokens, hidden] fp32 to q, k, v [num_tokens, num_heads, head_dim], keys and values repeated."""
    h = rms_norm(x, norm).to(dtype)
    q, k, v = (F.linear(h, w.to(dtype)).view(len(x), -1, HEAD_DIM) for w in (wq, wk, wv))
    repeats = q.shape[1] // k.shape[1]
    q, k = rotate(q.float(), cos, sin).to(dtype), rotate(k.float(), cos, sin).to(dtype)
    return q, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)


def after_attention(
    x: Tensor, attended: Tensor, wo: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, dtype: torch.dtype
) -> Tensor:
    """The output projection and the feed-forward network, both added to x [num_tokens, hidden] fp32."""
    x = x + F.linear(attended, wo.to(dtype)).float()
    h = rms_norm(x, norm).to(dtype)
    return x + F.linear(F.silu(F.linear(h, gate.to(dtype))) * F.linear(h, up.to(dtype)), down.to(dtype)).float()


def head_logits(x: Tensor, norm: Tensor, embedding: Tensor, dtype: torch.dtype) -> Tensor:
    """Logits [num_tokens, vocab] fp32."""
    return F.linear(rms_norm(x, norm).to(dtype), embedding.to(dtype)).float()


def head_loss(x: Tensor, norm: Tensor, embedding: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    """The cross entropy of each target [num_tokens]."""
    return F.cross_entropy(head_logits(x, norm, embedding, dtype), targets, reduction="none")


def attend(q: Tensor, k: Tensor, v: Tensor, shapes: Sequence[tuple[int, int]]) -> Tensor:
    """Causal attention inside each row of each (rows, length) of `shapes`; returns [num_tokens, hidden]."""
    parts, start = [], 0
    for rows, length in shapes:
        end = start + rows * length
        q_part, k_part, v_part = (t[start:end].reshape(rows, length, -1, HEAD_DIM).transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q_part, k_part, v_part, is_causal=True)
        parts.append(out.transpose(1, 2).reshape(rows * length, -1))
        start = end
    return torch.cat(parts)


class FlatForward:
    """The forward pass of a LlamaForCausalLM over slabs, compiled for one number of tokens if asked."""

    def __init__(self, model: Any, settings: Settings, compiled: bool) -> None:
        self._model, self._dtype, self._device = model, settings.dtype, settings.device
        wrap: Callable[[Any], Any] = (lambda fn: torch.compile(fn, dynamic=False)) if compiled else (lambda fn: fn)
        self._before, self._after, self._loss = wrap(before_attention), wrap(after_attention), wrap(head_loss)
        inverse = ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
        angles = torch.outer(torch.arange(MAX_LENGTH, dtype=torch.float64), inverse).repeat(1, 2)[:, None]
        self._cos, self._sin = angles.cos().float().to(self._device), angles.sin().float().to(self._device)

    def hidden(self, tokens: Tensor, shapes: Sequence[tuple[int, int]]) -> Tensor:
        """The last hidden state [num_tokens, hidden], before the final norm."""
        model = self._model.model
        places = torch.cat([torch.arange(length, device=self._device).repeat(rows) for rows, length in shapes])
        cos, sin = self._cos[places], self._sin[places]
        x = F.embedding(tokens, model.embed_tokens.weight)
        for layer in model.layers:
            a, m, dtype = layer.self_attn, layer.mlp, self._dtype
            weights = (a.q_proj.weight, a.k_proj.weight, a.v_proj.weight)
            q, k, v = self._before(x, layer.input_layernorm.weight, *weights, cos, sin, dtype)
            weights = (m.gate_proj.weight, m.up_proj.weight, m.down_proj.weight)
            norm = layer.post_attention_layernorm.weight
            x = self._after(x, attend(q, k, v, shapes), a.o_proj.weight, norm, *weights, dtype)
        return x

    def losses(self, tokens: Tensor, targets: Tensor, shapes: Sequence[tuple[int, int]]) -> Tensor:
        """The cross entropy of each target [num_tokens]."""
        model = self._model.model
        x = self.hidden(tokens, shapes)
        losses: Tensor = self._loss(x, model.norm.weight, model.embed_tokens.weight, targets, self._dtype)
        return losses

    def predicted(self, tokens: Tensor, shapes: Sequence[tuple[int, int]]) -> Tensor:
        """The likeliest next token after each token [num_tokens]."""
        model = self._model.model
        x = self.hidden(tokens, shapes)
        return head_logits(x, model.norm.weight, model.embed_tokens.weight, self._dtype).argmax(-1)


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """An array of small unsigned numbers as int64 on the device."""
    tensor = torch.from_numpy(array.astype(np.int32))
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True).long()


def merge(slabs: Sequence[Slab]) -> tuple[list[Slab], list[tuple[int, int]]]:
    """Slabs in order of their length, and the (rows, length) of each run of equal lengths."""
    ordered = sorted(slabs, key=lambda slab: slab.length)
    rows: dict[int, int] = {}
    for slab in ordered:
        rows[slab.length] = rows.get(slab.length, 0) + len(slab.tokens) // slab.length
    return ordered, [(count, length) for length, count in rows.items()]


def batch_loss(forward: FlatForward, slabs: Sequence[Slab], device: torch.device) -> tuple[Tensor, Tensor]:
    """The loss to descend, and within it the mean loss on answers."""
    ordered, shapes = merge(slabs)
    tokens, targets, codes = (
        on_device(np.concatenate([getattr(slab, name) for slab in ordered]), device)
        for name in ("tokens", "targets", "codes")
    )
    losses = forward.losses(tokens, targets, shapes)
    weights = (codes - 1).clamp(min=0).float()
    answers = (losses * weights).sum() / weights.sum().clamp(min=1)
    prompts = (losses * (codes == 1)).sum() / (codes == 1).sum().clamp(min=1)
    return answers + PROMPT_LOSS * prompts, answers.detach()


def learning_rate(progress: float, peak: float) -> float:
    """Warm up for 2 % of the run, hold to half of it, then fall along a cosine to a fiftieth."""
    if progress < 0.02:
        return peak * max(progress / 0.02, 0.01)
    if progress < 0.5:
        return peak
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min((progress - 0.5) / 0.5, 1))))


def new_optimizer(model: LlamaForCausalLM, settings: Settings) -> torch.optim.Optimizer:
    """AdamW, with decay on matrices alone."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    fused = settings.device.type == "cuda"
    return torch.optim.AdamW(groups, lr=settings.peak_lr, betas=(0.9, 0.95), fused=fused)


class Clock:
    """How far the run is, by steps where they are given and else by time."""

    def __init__(self, settings: Settings) -> None:
        self._steps, self._seconds = settings.steps, settings.minutes * 60
        self.step, self._start = 0, time.perf_counter()

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._start

    @property
    def progress(self) -> float:
        return self.step / self._steps if self._steps else self.elapsed_s / self._seconds


def train(settings: Settings, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, source: SlabSource) -> int:
    """Train until the clock says so; returns the number of tokens seen. Saves as it goes."""
    forward = FlatForward(model, settings, settings.compiled)
    probe = Probe(settings, model, Codec(tokenizer))
    optimizer = new_optimizer(model, settings)
    one_step(settings, forward, optimizer, source, 0.0)  # compiles, outside the clock
    clock, saved_s = Clock(settings), 0.0
    while clock.progress < 1:
        source.progress.value = clock.progress
        answers = one_step(settings, forward, optimizer, source, learning_rate(clock.progress, settings.peak_lr))
        clock.step += 1
        if clock.step % 200 == 0:
            report(clock, float(answers), source, settings)  # float() waits, so the clock and the GPU stay together
        if clock.elapsed_s - saved_s > settings.save_every_s:
            saved_s = clock.elapsed_s
            print(f"probe step={clock.step} {probe.run()}", flush=True)
            save(settings.out, model, tokenizer)
    return clock.step * settings.slab_tokens * settings.slabs_per_step


def one_step(
    settings: Settings, forward: FlatForward, optimizer: torch.optim.Optimizer, source: SlabSource, lr: float
) -> Tensor:
    """One step of the optimizer; returns the mean loss on answers."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    loss, answers = batch_loss(forward, source.get(settings.slabs_per_step), settings.device)
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return answers


def report(clock: Clock, answers: float, source: SlabSource, settings: Settings) -> None:
    """One line of progress."""
    rate = clock.step * settings.slab_tokens * settings.slabs_per_step / clock.elapsed_s
    print(
        f"step={clock.step} progress={clock.progress:.3f} answer_loss={answers:.4f} tokens_per_s={rate:,.0f} "
        f"waited_for_data_s={source.waited_s:.1f} elapsed_s={clock.elapsed_s:.0f}",
        flush=True,
    )


EVALS: dict[str, Callable[[Random], tasks.Sample]] = {
    "recall, 200 tokens": lambda rng: tasks.recall(rng, "heldout", 200),
    "recall, 500 tokens": lambda rng: tasks.recall(rng, "heldout", 500),
    "recall, 1,500 tokens": lambda rng: tasks.recall(rng, "heldout", 1500),
    "recall, 2,500 tokens": lambda rng: tasks.recall(rng, "heldout", 2500),
    "recall, 3,500 tokens": lambda rng: tasks.recall(rng, "heldout", 3500),
    "recall, 3,900 tokens": lambda rng: tasks.recall(rng, "heldout", 3900),
    "recall, 1,500 tokens, plain text": lambda rng: tasks.recall(rng, "heldout", 1500, plain=True),
    "recall from an earlier turn": lambda rng: tasks.chat_recall(rng, "heldout", rng.randint(1, 8)),
    "sum of two numbers": lambda rng: tasks.sums(rng, "heldout"),
    "sum of two numbers, plain text": lambda rng: tasks.sums(rng, "heldout", plain=True),
    "sum of three numbers": lambda rng: tasks.sums3(rng, "heldout"),
    "sort numbers": lambda rng: tasks.sort_numbers(rng, "heldout"),
    "sort words": lambda rng: tasks.sort_words(rng, "heldout"),
    "reverse a list": lambda rng: tasks.reverse(rng, "heldout"),
    "repeat": lambda rng: tasks.repeat(rng, "heldout"),
    "count items in a list": lambda rng: tasks.count_items(rng, "heldout"),
    "count up or down": lambda rng: tasks.count_up(rng, "heldout"),
    "fill a JSON object": lambda rng: tasks.fill_json(rng, "heldout"),
    "story": lambda rng: tasks.story(rng, "heldout"),
    "long story": lambda rng: tasks.long_story(rng, "heldout"),
    "small talk": lambda rng: tasks.small_talk(rng, "heldout"),
}
PROBES = [name for name in EVALS if "story" not in name and "200" not in name and "2,500" not in name]


def heldout(name: str, count: int, seed: int) -> list[tasks.Sample]:
    """`count` held-out samples of one row of the accuracy table."""
    rng = Random(f"{name} {seed}")
    return [EVALS[name](rng) for _ in range(count)]


class Probe:
    """A quick measure while training: is every token of the answer the likeliest one, given those before it?

    For a task with one right answer that is the same as greedy generation giving it.
    """

    def __init__(self, settings: Settings, model: LlamaForCausalLM, codec: Codec) -> None:
        self._forward = FlatForward(model, settings, compiled=False)
        self._device = settings.device
        self._slabs = {}
        for name in PROBES:
            rows = [encode_sample(codec, item) for item in heldout(name, max(settings.eval_prompts // 4, 4), seed=1)]
            longest = max(len(ids) for ids, _ in rows)
            if longest <= settings.max_length:
                self._slabs[name] = build_slab(rows, longest)

    @torch.inference_mode()
    def run(self) -> str:
        """The accuracies as one line."""
        return " ".join(f"{name.replace(' ', '_')}={self._one(slab):.2f}" for name, slab in self._slabs.items())

    def _one(self, slab: Slab) -> float:
        rows = len(slab.tokens) // slab.length
        predicted = self._forward.predicted(on_device(slab.tokens, self._device), [(rows, slab.length)])
        right = predicted == on_device(slab.targets, self._device)
        wrong_answer = ~right & (on_device(slab.codes, self._device) == 2)
        return float((~wrong_answer.view(rows, -1).any(-1)).float().mean())


@dataclass(frozen=True)
class Score:
    """One row of the accuracy table."""

    name: str
    num_prompts: int
    num_right: int
    mean_prompt_tokens: float
    mean_answer_tokens: float


def evaluate(settings: Settings) -> list[Score]:
    """Greedy generation on held-out prompts with the saved weights in fp32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    tokenizer = AutoTokenizer.from_pretrained(settings.out)
    model: Any = AutoModelForCausalLM.from_pretrained(settings.out, dtype=torch.float32)
    model = model.to(settings.device).eval()
    scores = []
    for name in settings.eval_rows:
        samples = heldout(name, settings.eval_prompts, seed=2)
        if max(len(prompt_ids(tokenizer, sample)) for sample in samples) <= settings.max_length:
            scores.append(score(name, model, tokenizer, samples))
            print(f"{name}: {scores[-1].num_right} of {scores[-1].num_prompts}", flush=True)
    return scores


def prompt_ids(tokenizer: Any, sample: tasks.Sample) -> list[int]:
    """The ids that the model is given for a sample."""
    if sample.plain:
        return list(tokenizer.encode(sample.prompt))
    return list(tokenizer.apply_chat_template(sample.messages, add_generation_prompt=True, return_dict=False))


@torch.inference_mode()
def score(name: str, model: Any, tokenizer: Any, samples: Sequence[tasks.Sample]) -> Score:
    """One row of the table, in batches of about 100,000 tokens."""
    prompts = [prompt_ids(tokenizer, sample) for sample in samples]
    longest = max(map(len, prompts))
    size = max(1, min(len(samples), 100_000 // longest if model.device.type == "cuda" else 4096 // longest))
    right, num_out = 0, 0
    for start in range(0, len(samples), size):
        replies = greedy(model, tokenizer, prompts[start : start + size], samples[start : start + size])
        num_out += sum(len(tokenizer.encode(reply, add_special_tokens=False)) + 1 for reply in replies)
        right += sum(sample.check(reply) for sample, reply in zip(samples[start:], replies, strict=False))
    return Score(name, len(samples), right, sum(map(len, prompts)) / len(samples), num_out / len(samples))


def greedy(model: Any, tokenizer: Any, prompts: Sequence[list[int]], samples: Sequence[tasks.Sample]) -> list[str]:
    """The greedy replies to a batch of prompts."""
    batch = tokenizer.pad({"input_ids": list(prompts)}, padding_side="left", return_tensors="pt").to(model.device)
    num_new = max(len(tokenizer.encode(sample.answer)) for sample in samples) + 16
    if samples[0].kind == "story":
        num_new = 400
    out = model.generate(
        batch["input_ids"], attention_mask=batch["attention_mask"], do_sample=False, max_new_tokens=num_new
    )
    return list(tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True))


GENERATION_CONFIG = {
    "bos_token_id": BOS,
    "pad_token_id": PAD,
    "eos_token_id": [IM_END, EOT],
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.95,
}


HOW_IT_WAS_LOADED = {"backend", "is_local", "local_files_only"}  # transformers 5 writes these, and needs none of them


def save(out: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write the weights, rounded to bf16, with their configuration and tokenizer."""
    rounded: Any = LlamaForCausalLM(model_config())
    rounded.load_state_dict(model.state_dict())
    rounded = rounded.to(torch.bfloat16)
    rounded.generation_config = type(rounded.generation_config)(**GENERATION_CONFIG)
    rounded.save_pretrained(out)
    tokenizer.save_pretrained(out)
    path = out / "tokenizer_config.json"  # the class is named so that transformers 4 and 5 both know it
    config = {key: value for key, value in json.loads(path.read_text()).items() if key not in HOW_IT_WAS_LOADED}
    path.write_text(json.dumps({**config, "tokenizer_class": "PreTrainedTokenizerFast"}, indent=2) + "\n")


CARD = """\
---
language: en
license: apache-2.0
pipeline_tag: text-generation
---

# baton-tiny

A Llama-architecture model of {millions:.2f} million parameters, small enough to ship in a repository and to answer on
a CPU, and trained so that its answers can be checked: a serving system that corrupts, drops or mixes up KV-cache
blocks gets its recall answers wrong. It knows nothing about the world.

| | |
| --- | --- |
| parameters | {parameters:,} (embeddings tied) |
| layers, hidden, feed-forward | {layers}, {hidden}, {ffn} |
| query heads, KV heads, head dimension | {heads}, {kv_heads}, {head_dim} |
| positions | {positions:,} (RoPE, theta {theta:,.0f}) |
| tokenizer | byte-level BPE, {vocab:,} tokens, every digit its own token |
| weights | bf16, {weights_bytes:,} bytes; the folder {folder_bytes:,} bytes |
| KV cache | {kv_bytes:,} bytes a token in fp32 |

## What it can do

Recall a fact stated anywhere in its 4,096 tokens or in an earlier turn, add small numbers, sort and reverse short
lists, repeat, count, fill a JSON object from given facts, and tell simple stories. Prompts of any other kind, or
worded otherwise than `tools/tiny_tasks.py` words them, get nonsense.

The chat template knows the roles system, user and assistant. A turn ends with `<|im_end|>`, plain text with
`<|endoftext|>`; both are in `eos_token_id`. Plain text starts with `<|bos|>`, which the tokenizer adds.

## Accuracy

Greedy answers to held-out prompts, with the weights of this folder (rounded to bf16) computed in fp32. They are
held out by content: the training tasks of the same kind never draw these facts, sums, lists and ranges (stories and
small talk have nothing to hold out). An answer counts if it is exactly the expected one; a JSON object if it is equal;
a story if it is at least 25 words in whole, different sentences and mentions the animal asked for.

| task | prompts | right | prompt tokens, mean | answer tokens, mean |
| --- | ---: | ---: | ---: | ---: |
{rows}

## How it was made

{how}

The data is generated by `tools/tiny_tasks.py`; nothing else was used. Measured on {card_date} with Python
{python}, torch {torch}, transformers {transformers}, on {machine}.
"""


def write_card(settings: Settings, scores: Sequence[Score], how: str) -> None:
    """Write README.md, the model card, beside the weights."""
    config = LlamaConfig.from_pretrained(settings.out)
    shapes = [p.shape for p in LlamaForCausalLM(config).parameters()]
    count = sum(math.prod(shape) for shape in shapes)
    rows = [
        f"| {s.name} | {s.num_prompts} | {100 * s.num_right / s.num_prompts:.1f} % | {s.mean_prompt_tokens:,.0f} "
        f"| {s.mean_answer_tokens:.0f} |"
        for s in scores
    ]
    files = [path for path in settings.out.iterdir() if path.suffix in {".json", ".safetensors", ".jinja"}]
    text = CARD.format(
        millions=count / 1e6,
        parameters=count,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        ffn=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=HEAD_DIM,
        positions=config.max_position_embeddings,
        theta=ROPE_THETA,
        vocab=len(AutoTokenizer.from_pretrained(settings.out)),
        weights_bytes=(settings.out / "model.safetensors").stat().st_size,
        folder_bytes=sum(path.stat().st_size for path in files),
        kv_bytes=config.num_hidden_layers * 2 * (config.num_key_value_heads or 0) * HEAD_DIM * 4,
        rows="\n".join(rows),
        how=how,
        card_date=settings.card_date,
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        machine=machine_name(settings.device),
    )
    (settings.out / "README.md").write_text(text)


def machine_name(device: torch.device) -> str:
    """The chip that a device is."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"a CPU ({platform.machine()})"


def previous_how(out: Path) -> str:
    """What the card of an earlier run says about how the weights were made."""
    card = out / "README.md"
    if not card.exists():
        return "(not recorded)"
    return card.read_text().split("## How it was made\n\n", 1)[1].split("\n\nThe data is generated", 1)[0]


def parse(argv: Sequence[str]) -> tuple[Settings, bool]:
    """The settings that the flags ask for, and whether only to evaluate."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True, help="the checkpoint folder to write")
    parser.add_argument("--minutes", type=float, default=8.0, help="training time, without start-up and evaluation")
    parser.add_argument("--steps", type=int, default=0, help="train for this many steps instead")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--resume", type=Path, help="start from the weights and the tokenizer of this folder")
    parser.add_argument("--peak-lr", type=float, default=2.5e-3)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="prove the script in a minute on a CPU")
    parser.add_argument("--eval-only", action="store_true", help="evaluate the folder and rewrite its card")
    parser.add_argument("--eval-prompts", type=int, default=400, help="held-out prompts for each row of the table")
    parser.add_argument("--date", default=datetime.now(tz=UTC).date().isoformat(), help="the date on the card")
    flags = parser.parse_args(argv)
    device = torch.device(flags.device)
    small = flags.smoke
    return Settings(
        out=flags.out,
        minutes=0.25 if small else flags.minutes,
        steps=flags.steps,
        seed=flags.seed,
        device=device,
        compiled=device.type == "cuda" and not flags.no_compile,
        resume=flags.resume,
        peak_lr=flags.peak_lr,
        num_workers=max(1, (os.cpu_count() or 2) - 2),
        slab_tokens=1024 if small else 16384,
        slabs_per_step=2 if small else 4,
        max_length=512 if small else MAX_LENGTH,
        eval_prompts=8 if small else flags.eval_prompts,
        eval_rows=("recall, 200 tokens", "sum of two numbers", "small talk") if small else tuple(EVALS),
        save_every_s=8 if small else 45,
        card_date=flags.date,
    ), flags.eval_only


def start(settings: Settings) -> tuple[Any, Any]:
    """A fresh model and tokenizer, or those of the folder to resume from."""
    if settings.resume is None:
        return new_model(settings.seed), build_tokenizer(settings.seed)
    model = AutoModelForCausalLM.from_pretrained(settings.resume, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(settings.resume)


def describe(settings: Settings, argv: Sequence[str], num_tokens: int) -> str:
    """The card's paragraph on the training run."""
    how = (
        f"`python tools/train_tiny.py {' '.join(argv)}`: {num_tokens / 1e6:,.0f} million tokens of generated chats and "
        f"texts on {machine_name(settings.device)}, AdamW, fp32 master weights with matrix products in "
        f"{str(settings.dtype).removeprefix('torch.')}."
    )
    return how if settings.resume is None else f"{previous_how(settings.resume)}\n\nThen {how}"


def main(argv: Sequence[str]) -> None:
    """Train, evaluate and write the card."""
    settings, eval_only = parse(argv)
    if eval_only:
        write_card(settings, evaluate(settings), previous_how(settings.out))
        return
    settings.out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    model, tokenizer = start(settings)
    codec = Codec(tokenizer)
    codec.verify(settings.seed)
    source = SlabSource(settings, codec)
    print(f"tokenizer={len(tokenizer)} prepared_s={time.perf_counter() - began:.1f}", flush=True)
    try:
        num_tokens = train(settings, model.to(settings.device), tokenizer, source)
    finally:
        source.close()
    save(settings.out, model, tokenizer)
    how = describe(settings, argv, num_tokens)
    write_card(settings, [], how)
    write_card(settings, evaluate(settings), how)
    print(f"total_s={time.perf_counter() - began:.0f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
