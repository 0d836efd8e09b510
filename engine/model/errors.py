"""Why a model cannot be served: ends the start with one line."""

from __future__ import annotations


class ModelError(ValueError):
    """Root: something about --model is wrong."""


class ModelNotFound(ModelError):
    """Neither a folder nor a model of the hub (or of its local cache, when offline)."""


class UnsupportedModel(ModelError):
    """A checkpoint that this engine would load and get wrong, or not load at all."""
