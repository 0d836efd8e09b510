"""Compares our logits with transformers': `python -m benchmarks.accuracy.logits [--device cuda --dtype bfloat16]`.

Ours: three prompts, prefilled in chunks and then decoded with given tokens, over paged KV, in mixed batches, with fast
modules. Theirs: whole sequences with transformers' eager attention and the same weights, in fp32; and also in the
dtype, to show the error of the dtype alone. Their sequences are padded on the right to MAX_MODEL_LEN tokens, which
changes nothing to the left, but makes longrope and dynamic NTK use the frequencies of that length, as ours do.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from typing import ClassVar, Literal

import torch
import transformers
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel

from baton.settings import Settings, parse
from baton_kernels.paged_attention import PagedBatch
from benchmarks.accuracy.random_models import FAMILIES, MAX_MODEL_LEN, VOCAB_SIZE, make
from benchmarks.harness.tables import Table
from engine.model import fast
from engine.model.attention import IMPLEMENTATION, attach
from engine.model.kv_pool import KvPool
from engine.model.probe import probe

BLOCK_SIZE = 16
LENGTHS = (100, 40, 73)
STEPS: tuple[tuple[tuple[int, int, int], ...], ...] = (
    ((0, 0, 37), (1, 0, 33)),
    ((1, 33, 34), (0, 37, 90), (2, 0, 70)),
    ((1, 34, 35), (2, 70, 71), (0, 90, 97)),
    ((0, 97, 98), (1, 35, 36), (2, 71, 72)),
    ((2, 72, 73), (1, 36, 37), (0, 98, 99)),
    ((0, 99, 100), (1, 37, 40)),
)
"""Batches of chunks (sequence, start, end), decodes first."""
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class LogitsSettings(Settings):
    """Compares logits with transformers'."""

    prog: ClassVar[str] = "benchmarks.accuracy.logits"

    device: Literal["cpu", "cuda"] = Field("cpu", description="where to compute")
    dtype: Literal["float32", "float16", "bfloat16"] = Field("float32", description="what to compute in")
    families: str = Field("", description="names, separated by commas; all when empty")


@dataclass(frozen=True, slots=True)
class Agreement:
    """Two sets of logits for the same tokens. Errors are relative, in the norm of a token's logits: the mean over all
    tokens, and the worst, which in 16 bits is large where rounding sends a token to another expert."""

    num_tokens: int
    same_argmax: int
    mean_error: float
    worst_error: float

    @classmethod
    def of(cls, actual: Tensor, expected: Tensor) -> Agreement:
        """Both [num_tokens, vocab_size]."""
        error = (actual.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)
        same = int((actual.argmax(-1) == expected.argmax(-1)).sum())
        return cls(len(actual), same, float(error.mean()), float(error.max()))


@dataclass(frozen=True, slots=True)
class Compared:
    """fused: the fused modules, as logged at startup. own_dtype: transformers in the dtype against itself in fp32."""

    family: str
    fused: str
    ours: Agreement
    own_dtype: Agreement


@torch.inference_mode()
def compare(family: str, device: torch.device, dtype: torch.dtype) -> Compared:
    """Raises UnsupportedModel."""
    tokens = [_prompt(i, length) for i, length in enumerate(LENGTHS)]
    expected = _reference(family, tokens, torch.float32, device)
    same_dtype = expected if dtype == torch.float32 else _reference(family, tokens, dtype, device)
    model = make(family, dtype, device, IMPLEMENTATION)
    probed = probe(model, MAX_MODEL_LEN)
    report = fast.apply(model, probed, MAX_MODEL_LEN)
    pool = KvPool(probed.kv, 33, BLOCK_SIZE, device)
    ours = _paged(model, probed.layers, pool, tokens)
    return Compared(family, str(report), Agreement.of(ours, expected), Agreement.of(same_dtype, expected))


def _prompt(index: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(index)
    tokens: list[int] = torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
    return tokens


def _reference(family: str, tokens: Seq[list[int]], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Logits of plain transformers: [sum of lengths, vocab_size], fp32."""
    model = make(family, dtype, device, "eager")
    rows = [[*row, *[3] * (MAX_MODEL_LEN - len(row))] for row in tokens]
    logits = model(input_ids=torch.tensor(rows, device=device), use_cache=False).logits.float()
    return torch.cat([logits[i, : len(row)] for i, row in enumerate(tokens)])


def _paged(model: PreTrainedModel, layers: list[torch.nn.Module], pool: KvPool, tokens: Seq[list[int]]) -> Tensor:
    """Logits as a node computes them: [sum of lengths, vocab_size], fp32."""
    device, (step,) = model.device, attach(layers, pool)
    order = torch.randperm(pool.num_blocks - 1, generator=torch.Generator().manual_seed(0)) + 1
    width = MAX_MODEL_LEN // pool.block_size
    tables = [order[i * width : (i + 1) * width].tolist() for i in range(len(tokens))]
    rows: list[list[Tensor]] = [[] for _ in tokens]
    for chunks in STEPS:
        lengths = [end - start for _, start, end in chunks]
        batch = PagedBatch.build([tables[i] for i, _, _ in chunks], lengths, [c[2] for c in chunks], BLOCK_SIZE, device)
        step.batch, step.slot_mapping = batch, batch.slot_mapping()
        flat = [token for i, start, end in chunks for token in tokens[i][start:end]]
        positions = [p for _, start, end in chunks for p in range(start, end)]
        logits = model(
            input_ids=torch.tensor([flat], device=device),
            position_ids=torch.tensor([positions], device=device),
            use_cache=False,
            logits_to_keep=torch.arange(len(flat), device=device),
        ).logits[0]
        for (i, _, _), piece in zip(chunks, logits.float().split(lengths), strict=True):
            rows[i].append(piece)
    return torch.cat([piece for pieces in rows for piece in pieces])


def as_table(results: Seq[Compared]) -> Table:
    columns = ["model", "argmax", "mean error", "worst", "argmax of theirs", "mean error", "worst"]
    rows = []
    for result in results:
        cells = []
        for agreement in (result.ours, result.own_dtype):
            errors = (agreement.mean_error, agreement.worst_error)
            cells += [f"{agreement.same_argmax}/{agreement.num_tokens}", *(f"{error:.1e}" for error in errors)]
        rows.append([result.family, *cells])
    return Table(columns, rows)


def main(argv: Seq[str] | None = None) -> None:
    settings = parse(LogitsSettings, argv)
    transformers.utils.logging.set_verbosity_error()
    names = [name.strip() for name in settings.families.split(",") if name] or list(FAMILIES)
    if unknown := set(names) - set(FAMILIES):
        sys.exit(f"{settings.prog}: --families: {', '.join(sorted(unknown))}: not among {', '.join(FAMILIES)}")
    results = [compare(name, torch.device(settings.device), DTYPES[settings.dtype]) for name in names]
    print(as_table(results).plain())
    print()
    print(Table(["model", "fused"], [[result.family, result.fused] for result in results]).plain())
    line = {"benchmark": "logits", "device": settings.device, "dtype": settings.dtype}
    print(json.dumps({**line, "results": [asdict(result) for result in results]}), flush=True)


if __name__ == "__main__":
    main()
