"""The decode role: takes over computed prompts and generates their tokens by continuous batching.

`core` is the state machine that runs on the engine's thread; `reservations` keeps what prefill nodes are promised, and
`leases` is one such promise; `running` keeps the requests that generate; `server` carries their messages; `main` is the
process. May import `engine`, `kv_transfer`, `baton`; never another role.
"""
