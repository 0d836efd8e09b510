"""A fleet in one process and in virtual time: the router's core, and nodes' cores on the simulated engine.

`clock` runs events in order of their time, `trace` and `workloads` say what arrives when, `transport` and `node` are
what surrounds a role's core instead of sockets, `fleet` joins all of it, `report` measures what clients saw.
"""
