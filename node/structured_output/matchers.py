"""The matchers of a node's requests, some of which are still being compiled."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from baton.errors import InvalidRequest
from baton.messages import AttemptId
from baton.sampling import SamplingParams
from engine.token_matcher import TokenMatcher

if TYPE_CHECKING:
    from node.structured_output.grammars import Grammars  # imports numpy, which a simulated node does without


class Matchers:
    """`grammars`: compiles them; None: requests with structured outputs are refused."""

    def __init__(self, grammars: Grammars | None) -> None:
        self._grammars = grammars
        self._compiling: list[tuple[AttemptId, TokenMatcher]] = []

    def make(self, attempt_id: AttemptId, sampling: SamplingParams, output: Seq[int] = ()) -> TokenMatcher | None:
        """The matcher of a sample with that output, if it has one. Raises InvalidRequest."""
        if sampling.structured_outputs is None:
            return None
        matcher = self._known_grammars().matcher(sampling.structured_outputs, output)
        self._compiling.append((attempt_id, matcher))
        return matcher

    def compile_ahead(self, sampling: SamplingParams) -> None:
        """Begin to compile what `make` will be asked for, so that `make` raises nothing then. Raises InvalidRequest."""
        if sampling.structured_outputs is not None:
            self._known_grammars().matcher(sampling.structured_outputs)

    def take_failed(self) -> list[tuple[AttemptId, InvalidRequest]]:
        """The attempts whose grammars cannot be compiled, each once, and why."""
        failed = list[tuple[AttemptId, InvalidRequest]]()
        compiling, self._compiling = self._compiling, []
        for attempt_id, matcher in compiling:
            was_ready = matcher.ready  # asked first, since it may become ready at any time
            if (error := matcher.error) is not None:
                failed.append((attempt_id, InvalidRequest(error, "structured_outputs")))
            elif not was_ready:
                self._compiling.append((attempt_id, matcher))
        return failed

    def _known_grammars(self) -> Grammars:
        if self._grammars is None:
            raise InvalidRequest("this node has no structured outputs", "structured_outputs")
        return self._grammars
