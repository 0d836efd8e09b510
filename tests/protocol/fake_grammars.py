"""Compiles what answers of `FakeModel` must match."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence

from baton.structured_output.constraint import StructuredKind, StructuredOutput
from tests.engine.forcing import Compiling, Forcing
from tests.protocol.fake_model import FakeModel


def structured(
    prompt: Sequence[int],
    seed: int | None,
    finishes_at: int | None = None,
    fails_at: int | None = None,
    compiles: bool = True,
) -> StructuredOutput:
    """What `FakeGrammars` makes a `Forcing` of, with these fields."""
    fields = {"prompt": prompt, "seed": seed, "finishes_at": finishes_at, "fails_at": fails_at, "compiles": compiles}
    return StructuredOutput(StructuredKind.REGEX, json.dumps(fields))


class FakeGrammars:
    """Has the interface of `node.structured_output.grammars.Grammars`. It compiles on the model's device, behind all
    that is launched, since that wakes the node."""

    def __init__(self, model: FakeModel) -> None:
        self._model = model
        self._random = random.Random(0)
        self._compiled: dict[bytes, Compiling] = {}

    def matcher(self, structured: StructuredOutput, output_tokens: Iterable[int] = ()) -> Forcing:
        """What `structured` did not make never compiles."""
        try:
            fields = json.loads(structured.text)
            prompt, compiles = tuple(fields.pop("prompt")), fields.pop("compiles")
        except ValueError:
            fields, prompt, compiles = {"seed": None}, (), False
        compiling = self._compiled.get(structured.digest)
        if compiling is None:
            compiling = self._compiled[structured.digest] = Compiling(fails=not compiles)
            self._model.enqueue(compiling.finish)
        return Forcing(self._random, prompt, tokens=[*output_tokens], compiling=compiling, **fields)
