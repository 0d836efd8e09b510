"""Garbage of a node's start: collected once, while nothing waits for it, and never looked at again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from node.run import MakeParts, _make_parts_that_stay
from node.settings import NodeSettings
from node.shell import NodeParts

SETTINGS = NodeSettings(model="nowhere")


class Knot:
    """Garbage for the collector, once nobody holds it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def make(make_parts: Callable[..., object], imported: Callable[[], object] = lambda: None) -> Any:
    def import_parts() -> MakeParts:
        imported()
        return cast(MakeParts, make_parts)

    return _make_parts_that_stay(import_parts, SETTINGS, lambda: None)


def test_what_is_made_is_collected_once_and_stays() -> None:
    knots: list[weakref.ref[Knot]] = []

    def make_parts(settings: NodeSettings, wake: Callable[[], None], ranks: object) -> NodeParts:
        assert settings is SETTINGS
        assert not gc.isenabled()
        knots.append(weakref.ref(Knot()))
        assert knots[0]() is not None
        return cast(NodeParts, Knot())

    parts = make(make_parts)
    assert gc.isenabled()
    assert knots[0]() is None
    assert not any(known is parts for known in gc.get_objects())


def test_what_is_imported_is_not_looked_at_even_once() -> None:
    knots: list[weakref.ref[Knot]] = []
    make(lambda *_: None, imported=lambda: knots.append(weakref.ref(Knot())))
    assert knots[0]() is not None


@pytest.mark.parametrize("where", ["make_parts", "imported"])
def test_a_start_that_fails_leaves_the_collector_on(where: str) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no such model")

    steps = {"make_parts": lambda *_: None, where: fail}
    with pytest.raises(ValueError, match="no such model"):
        make(**steps)
    assert gc.isenabled()
