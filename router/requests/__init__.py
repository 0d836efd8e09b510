"""The router's state machine, `core.RouterCore`: events in, actions out, without I/O and without a clock of its own.

`request_state` is the state of one request, `attempts` which parts of it are on which nodes or wait for one. `updates`
says what a node's message means, `recovery` what follows when an attempt fails, and `migrations` moves attempts between
decode nodes. `docs/protocol.md` has the rules.
"""
