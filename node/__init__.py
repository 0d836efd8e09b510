"""The node shell that both roles share: settings, router sessions, the engine's thread, status and metrics pages.

The roles differ in intake and handoff. Each gives the shell a `Role` (see `events`), which runs on the engine's thread
and owns engine, leases and slots without a lock; the shell carries its messages. `core` is the common part of both
roles' state machines; `parts` builds a node around one. `ranks` has the other processes of a node with several ranks,
on this host and on others; `peers` the nodes that are data parallel with this one; `handoffs` the streams to decode
nodes and the sending half of a handoff; `kv_events` the messages about the prefix cache; and `structured_output` the
grammars that answers must match. May import `engine`, `kv_transfer`, `baton_kernels`, `baton`; never a role.
"""
