"""Reasons why a model cannot be served; each of these errors ends the start with one line."""

from __future__ import annotations


class ModelError(ValueError):
    """Base class: something about --model is wrong."""


class ModelNotFound(ModelError):
    """Neither a folder nor a model of the hub (or of its local cache, when offline)."""


class UnsupportedModel(ModelError):
    """A checkpoint that this engine cannot load, or would compute wrongly."""
