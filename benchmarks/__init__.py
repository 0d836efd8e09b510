"""Benchmarks: each first checks that answers are correct, then prints a table and ends with one JSON line.

Each folder measures one thing, and its modules are commands: `python -m benchmarks.engine.decode`. `disaggregation`
measures what the project is for: a pair of nodes against two single ones.

    serving      a cluster over HTTP, as its clients see it
    router       what the router costs
    kv_transfer  how fast KV blocks travel, and whom that slows down
    engine       steps of one engine in this process, against the machine's ceilings
    layers       a part of a step alone: a layer of experts, sums over ranks
    accuracy     how right answers are: against transformers, with quantized weights, under schemas
    simulation   fleets in virtual time, and the profiles of their nodes
    harness      what the folders share: ceilings, clusters, loads, checks, tables

A folder imports nothing of another one, except of `harness`. `models` has the shapes of real models, `traces` small
traces. May import everything but `tests`; nothing imports it.
"""
