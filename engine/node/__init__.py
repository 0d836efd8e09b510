"""The node shell, one for both roles: settings, router sessions, the engine's thread, what a node says of itself.

What differs between the roles is handoff: each gives the shell a `Role` (see `events`), which runs on the engine's
thread and owns engine, leases and slots without a lock; the shell carries its messages. `core` has what the state
machines of both roles have in common, `parts` makes a node around one.
"""
