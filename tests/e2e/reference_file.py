"""What `transformers` generates for the prompts of the parity tests, and how an answer is held against it.

The file keeps prompts as token ids, so it means the same whatever becomes of the code that made them up.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

FILE = Path(__file__).with_name("references.npz")
NEAR_TIE = 1e-4
"""Two best logits closer than this may swap places when sums are taken in another order."""


@dataclass(frozen=True, slots=True)
class Reference:
    """`margins[i]`: best logit minus second best where `output[i]` was chosen. `expert_margins[i]`, of a mixture: the
    least by which a router's choice was one, of any token before `output[i]` in any layer; not stored in files.

    kind: "ids" (random tokens), "text" (what the tokenizer makes of a text, and back), "shared" (common prefixes of
    growing length) or "long" (outputs of hundreds of tokens). `finish` is the API's finish reason.
    """

    kind: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    margins: tuple[float, ...]
    max_tokens: int
    ignore_eos: bool
    finish: str
    expert_margins: tuple[float, ...] = ()

    def difference(self, answer: Sequence[int], max_tokens: int | None = None) -> Difference | None:
        """Where `answer` leaves the reference first; None: nowhere.

        With `max_tokens` it answers a request for so many tokens, EOS ignored, of which the reference may know a part.
        """
        expected = self.output[:max_tokens]
        if max_tokens and len(answer) == max_tokens:
            answer = answer[: len(expected)]
        if tuple(answer) == expected:
            return None
        pairs = zip(expected, answer, strict=False)
        shorter = min(len(answer), len(expected))
        index = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), shorter)
        margin = self.margins[index] if index < shorter else float("inf")
        return Difference(index, margin, self, tuple(answer))


@dataclass(frozen=True, slots=True)
class Difference:
    index: int
    margin: float
    reference: Reference
    answer: tuple[int, ...]

    @property
    def is_near_tie(self) -> bool:
        return self.margin <= NEAR_TIE

    @property
    def is_expert_tie(self) -> bool:
        """Whether other experts may have been chosen before."""
        margins = self.reference.expert_margins[: self.index + 1]
        return bool(margins) and margins[-1] <= NEAR_TIE

    def __str__(self) -> str:
        window = slice(max(0, self.index - 3), self.index + 4)
        return (
            f"{self.reference.kind} prompt of {len(self.reference.prompt)} tokens: output {self.index} differs "
            f"(margin {self.margin:.2g}): ...{self.answer[window]} is not ...{self.reference.output[window]}"
        )


@dataclass(frozen=True, slots=True)
class ReferenceFile:
    """`fingerprint`: of the checkpoint. `made_with`: versions of the libraries."""

    fingerprint: str
    made_with: dict[str, str]
    references: tuple[Reference, ...]

    def of_kind(self, *kinds: str) -> list[Reference]:
        return [reference for reference in self.references if reference.kind in kinds]


def save(file: ReferenceFile, path: Path = FILE) -> None:
    """The same content gives the same bytes."""
    references = file.references
    about = {
        "fingerprint": file.fingerprint,
        "made_with": file.made_with,
        "references": [
            [r.kind, len(r.prompt), len(r.output), r.max_tokens, r.ignore_eos, r.finish] for r in references
        ],
    }
    np.savez_compressed(
        path,
        about=np.frombuffer(json.dumps(about).encode(), dtype=np.uint8),
        prompts=np.array([token for r in references for token in r.prompt], dtype=np.uint16),
        outputs=np.array([token for r in references for token in r.output], dtype=np.uint16),
        margins=np.array([margin for r in references for margin in r.margins], dtype=np.float16),
    )


@functools.cache
def load(path: Path = FILE) -> ReferenceFile:
    with np.load(path) as arrays:
        about = json.loads(arrays["about"].tobytes())
        prompts, outputs = arrays["prompts"].tolist(), arrays["outputs"].tolist()
        margins = arrays["margins"].astype(float).tolist()
    references, at_prompt, at_output = [], 0, 0
    for kind, num_prompt, num_output, *rest in about["references"]:
        output = slice(at_output, at_output + num_output)
        prompt = tuple(prompts[at_prompt : at_prompt + num_prompt])
        references.append(Reference(kind, prompt, tuple(outputs[output]), tuple(margins[output]), *rest))
        at_prompt, at_output = at_prompt + num_prompt, at_output + num_output
    return ReferenceFile(about["fingerprint"], about["made_with"], tuple(references))
