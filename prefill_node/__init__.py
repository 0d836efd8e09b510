"""The prefill role: computes prompts' KV caches in chunks and hands them to decode nodes.

`core` is the state machine that runs on the engine's thread; `outgoing` keeps its requests on their way to decode
nodes, `handoff` is one such request, and `parts_out` what of its KV leaves when; `links` keeps the streams to decode
nodes; `main` is the process. May import `engine`, `kv_transfer`, `baton`; never another role.
"""
