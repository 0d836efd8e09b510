"""A model that only takes time: what a node computes with `--engine simulated`.

`profile` reads what the steps of a real node cost, `tokens` makes up what the model says, `runner` is the engine's
ModelRunner. Everything above it (scheduler, blocks, prefix cache, the roles) is a real node's. No torch, no numpy.
"""
