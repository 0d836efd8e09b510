"""Classes by name: built-in ones, and those that installed packages offer as entry points."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import TypeVar

T = TypeVar("T")


class UnknownPlugin(Exception):
    """There is no such class, or it cannot be loaded; the text is one line that says why."""


def load_plugin(group: str, name: str, built_in: Mapping[str, type[T]], kind: type[T]) -> type[T]:
    """The class of that name, a subclass of `kind`. Built-in ones come first. Raises UnknownPlugin."""
    if name in built_in:
        return built_in[name]
    offered = {entry.name: entry for entry in entry_points(group=group)}
    if name not in offered:
        known = ", ".join(sorted({*built_in, *offered}))
        raise UnknownPlugin(f"there is none called {name!r}; there are {known}")
    try:
        found = offered[name].load()
    except Exception as error:  # code of another package: whatever it raises is why the router cannot start
        raise UnknownPlugin(f"{name} cannot be loaded: {type(error).__name__}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise UnknownPlugin(f"{name} is {offered[name].value}, which is no subclass of {kind.__name__}")
    return found
