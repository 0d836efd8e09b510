"""The logits processors that installed packages offer: entry points of the group `baton.logits_processors`.

An entry point is a factory: called with the arguments of a request, it gives the function that changes the logits (see
`engine.logits_processor`). Both kinds of node need the same ones, since a request begins on one and goes on on another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

from baton.errors import InvalidRequest
from baton.logits_processors import PARAM, THINKING_BUDGET, LogitsProcessor
from engine.logits_processor import LogitsProcessorChain
from node.thinking_budget import ThinkingBudget

GROUP = "baton.logits_processors"
Factory = Callable[..., Callable[..., Any]]

OWN: Mapping[str, Factory] = {THINKING_BUDGET: ThinkingBudget}


class LogitsProcessors:
    """Makes the processors of requests. `factories`: by name."""

    def __init__(self, factories: Mapping[str, Factory]) -> None:
        self._factories = dict(factories)

    @classmethod
    def installed(cls) -> LogitsProcessors:
        """All that are installed, imported now rather than while serving, and baton's own. Raises ValueError for one
        that cannot be imported."""
        return cls({**{entry.name: _load(entry) for entry in entry_points(group=GROUP)}, **OWN})

    def chain(self, wanted: Sequence[LogitsProcessor]) -> LogitsProcessorChain | None:
        """The chain of one request; None if it wants none. Raises InvalidRequest for a name that is not installed, and
        for arguments that its factory does not take."""
        if not wanted:
            return None
        made = [self._make(one) for one in wanted]
        try:
            return LogitsProcessorChain(made)
        except ValueError as error:
            raise InvalidRequest(f"{PARAM}: {error}", PARAM) from None

    def _make(self, wanted: LogitsProcessor) -> tuple[str, Callable[..., Any]]:
        factory = self._factories.get(wanted.name)
        if factory is None:
            known = ", ".join(sorted(self._factories)) or "none at all"
            text = f"{PARAM}: this node has none called {wanted.name!r}; it has {known}"
            raise InvalidRequest(text, PARAM)
        args, kwargs = wanted.parsed()
        try:
            return wanted.name, factory(*args, **kwargs)
        # A request's boundary: the arguments are the client's, the code is another package's.
        except Exception as error:
            text = f"{PARAM}: {wanted.name} refuses its arguments: {type(error).__name__}: {error}"
            raise InvalidRequest(text, PARAM) from error


def _load(entry: Any) -> Factory:
    try:
        factory: Factory = entry.load()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        raise ValueError(f"logits processor {entry.name} of {entry.value} cannot be loaded: {text}") from error
    if not callable(factory):
        raise ValueError(f"logits processor {entry.name}: {entry.value} cannot be called")
    return factory
