"""A simulated model, which only takes time: what a node runs with `--engine simulated`.

`profile` reads how long the steps of a real node take, `tokens` makes up the model's tokens, and `runner` is the
engine's ModelRunner. Everything above it (scheduler, blocks, prefix cache, the roles) is a real node's. No torch, no
numpy.
"""
