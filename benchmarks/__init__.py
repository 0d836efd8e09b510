"""Programs that measure a running cluster: each checks the answers first, prints a table and ends with one JSON line.

`serve` loads a cluster with concurrent streams; `router_overhead` compares the way through the router with `direct`, a
client of the nodes' own services. `cluster` starts what is measured where no address is given. May import everything
but `tests`; nothing imports it.
"""
