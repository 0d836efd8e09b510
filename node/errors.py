"""Why a node cannot start."""

from __future__ import annotations


class StartupError(Exception):
    """The text is one line that names the flag to change."""
