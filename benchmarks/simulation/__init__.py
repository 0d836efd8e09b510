"""A fleet in one process and in virtual time: the router's core, and nodes' cores on the simulated engine.

`replay` replays a trace with each placement policy, `check` compares a simulation with a cluster, `fit_profile`
measures the profile of a node, with `fit_served` also that of one that serves.

`clock` runs events in order of their time, `transport` and `node` are what surrounds a role's core instead of sockets,
`fleet` joins all of it, `report` measures what clients saw.
"""
