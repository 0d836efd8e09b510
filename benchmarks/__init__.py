"""Benchmarks: each first checks that answers are correct, then prints a table and ends with one JSON line.

A running cluster: `serve` loads it with concurrent streams; `router_overhead` compares the path through the router with
`direct`, a client of the nodes' own services. `cluster` starts a cluster if no address is given.

KV blocks between two processes: `kv_transfer` compares each transport with the ceilings measured in the same run.

One engine in this process: `engine_decode`, `engine_prefill` and `engine_throughput`, or all of them with one model
(`engine_all`), against `ceilings` of the same run; `performance_page` writes the results into docs/performance.md.

May import everything but `tests`; nothing imports it.
"""
