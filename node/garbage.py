"""Garbage collection of a process that loads a model and then serves.

A full collection goes through the 500,000 objects of torch and transformers and takes a third of a second. It would
make the start longer or, later, keep steps from being launched, on all ranks of a node. Collections during the imports
would take a fifth of the imports' time; the garbage that is never collected instead is 7 MiB.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Load within it, in a process that is not ours: collections are on or off afterwards as they were before."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def collected_once() -> Iterator[None]:
    """Load within it: garbage is collected once, at the end, and what is left is exempt from collections. Call
    `gc.freeze` after the imports, so that even that collection leaves their objects out."""
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
