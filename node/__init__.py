"""The node shell that both roles share: settings, router sessions, the engine's thread, status and metrics pages.

The roles differ in intake and handoff. Each gives the shell a `Role` (see `events`), which runs on the engine's thread
and owns engine, leases and slots without a lock; the shell carries its messages.
`core` is the common part of both roles' state machines; `parts` builds a node around one. `ranks` and `rank_*` are a
node's further processes, `hosts` and `headless` those on other hosts, `peer_nodes` and `data_parallel` the nodes that
are data parallel with it. May import `engine`, `kv_transfer`, `baton_kernels`, `baton`; never a role.
"""
