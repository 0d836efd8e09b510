"""Programs that measure: each checks the answers first, prints a table and ends with one JSON line.

A running cluster: `serve` loads it with concurrent streams; `router_overhead` compares the way through the router with
`direct`, a client of the nodes' own services. `cluster` starts what is measured where no address is given.

KV blocks between two processes: `kv_transfer`, each transport beside the ceilings of the same run.

One engine in this process: `engine_decode`, `engine_prefill` and `engine_throughput`, or `engine_all` of them with one
model, against `ceilings` of the same run; `performance_page` writes the results into docs/performance.md.

May import everything but `tests`; nothing imports it.
"""
