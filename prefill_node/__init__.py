"""The prefill role: computes prompts' KV caches in chunks and hands them to decode nodes.

`core` is the state machine that runs on the engine's thread. `outgoing` keeps the requests on their way to decode
nodes, `handoff` is one such request, and `parts_out` decides which parts of its KV leave when. `links` keeps the
streams to decode nodes, and `main` is the process. May import `engine`, `kv_transfer`, `baton`; never another role.
"""
