"""The decode role: takes over computed prompts and generates their tokens by continuous batching.

`core` is the state machine that runs on the engine's thread. `reservations` keeps the leases granted to prefill nodes,
`credits` shares the slots out among them, and `leases` defines a lease; `running` keeps the requests that generate, and
`migrations` hands them over to other decode nodes. `handoffs` and `server` carry their messages, and `main` is the
process. May import `node` and what is below it; never another role.
"""
