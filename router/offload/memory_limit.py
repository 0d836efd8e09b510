"""How much memory a process of the router's that does clients' work may have."""

from __future__ import annotations

import resource


def limit_memory(most_bytes: int) -> None:
    """Of its address space, unless it was started with less (`ulimit -v`), which no process may raise."""
    allowed = [limit for limit in resource.getrlimit(resource.RLIMIT_AS) if limit != resource.RLIM_INFINITY]
    limit = min((most_bytes, *allowed))
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
