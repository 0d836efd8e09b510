"""Train baton-tiny, the small Llama checkpoint of the repository, or baton-tiny-moe, on generated data alone.

    python tools/train_tiny.py --out engine/checkpoints/baton-tiny --minutes 8     # one GPU
    python tools/train_tiny.py --out engine/checkpoints/baton-tiny-moe --mixture --minutes 5
    python tools/train_tiny.py --out /tmp/baton-tiny --smoke                       # a minute on a CPU
    python tools/train_tiny.py --out engine/checkpoints/baton-tiny --eval-only     # measure, and write the card

It trains a byte-level BPE tokenizer on the tasks of `tiny_tasks`, then the model, then evaluates the saved weights
(rounded to bf16, computed in fp32, as they are run) by greedy generation on held-out prompts, and writes the card. The
implementation is in `tools/tiny/training`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that `tools` is found when run as a file
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the workers are forked, and each needs one thread only
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from baton.process.resources import num_cpus
from tools.tiny.training.card import describe, previous_how, write_card
from tools.tiny.training.codec import Codec
from tools.tiny.training.evaluate import EVALS, evaluate
from tools.tiny.training.mixture import mixture_config
from tools.tiny.training.model import model_config, new_model, save
from tools.tiny.training.settings import Settings
from tools.tiny.training.source import SlabSource
from tools.tiny.training.tokenizer import CHAT_TEMPLATE, MAX_LENGTH, build_tokenizer
from tools.tiny.training.train import train


def parse(argv: Sequence[str]) -> tuple[Settings, bool]:
    """The settings from the flags, and whether only to evaluate."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True, help="the checkpoint folder to write")
    parser.add_argument("--minutes", type=float, default=8.0, help="training time, without start-up and evaluation")
    parser.add_argument("--steps", type=int, default=0, help="train for this many steps instead")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--resume", type=Path, help="start from the weights and the tokenizer of this folder")
    parser.add_argument("--mixture", action="store_true", help="baton-tiny-moe: a mixture of experts like gpt-oss")
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
        num_workers=max(1, num_cpus() - 2),
        slab_tokens=1024 if small else 16384,
        slabs_per_step=2 if small else 4,
        max_length=512 if small else MAX_LENGTH,
        eval_prompts=8 if small else flags.eval_prompts,
        eval_rows=("recall, 200 tokens", "sum of two numbers", "call a tool", "small talk") if small else tuple(EVALS),
        save_every_s=8 if small else 45,
        card_date=flags.date,
        mixture=flags.mixture,
    ), flags.eval_only


def start(settings: Settings) -> tuple[Any, Any]:
    """A new model and tokenizer, or those of the folder to resume from."""
    if settings.resume is None:
        config = mixture_config() if settings.mixture else model_config()
        return new_model(settings.seed, config), build_tokenizer(settings.seed)
    model = AutoModelForCausalLM.from_pretrained(settings.resume, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(settings.resume)
    tokenizer.chat_template = CHAT_TEMPLATE  # it may have become able to say more
    return model, tokenizer


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
