"""The node shell that both roles share: settings, router sessions, the engine's thread, status and metrics pages.

The roles differ in intake and handoff. Each gives the shell a `Role` (see `events`), which runs on the engine's thread
and owns engine, leases and slots without a lock; the shell carries its messages.
`core` is the common part of both roles' state machines; `parts` builds a node around one.
"""
