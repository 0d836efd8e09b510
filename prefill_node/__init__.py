"""The prefill role: computes prompts' KV caches in chunks and hands them to decode nodes.

`core` is the state machine that runs on the engine's thread. `outgoing` keeps the requests on their way to decode
nodes, and `handoff` is one such request; `node.handoffs.parts_out` decides which parts of its KV leave when, and
`node.handoffs.decode_links` keeps the streams to decode nodes. `main` is the process. May import `node` and what is
below it; never another role.
"""
