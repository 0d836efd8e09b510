"""What the benchmarks share.

The machine: `ceilings`, which is also a command. A cluster for the duration of a measurement: `cluster`. Clients:
`http_stream`, with a `load` of requests, and `direct`, which asks the nodes' own services. `checks`: that answers are
correct. Things made up: `random_checkpoint`, `big_vocabulary`. `tables`: what is printed.
"""
