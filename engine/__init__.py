"""Turns sequences into tokens: model, KV cache, scheduler, sampler and the step that ties them together.

One thread owns an `Engine`. It takes sequences (`add`, or `adopt` for those prefilled elsewhere), and each step
computes one batch. Below it, `Scheduler` chooses what to compute, `BlockManager` says where KV lives (both are pure
Python, without tensors), and a `ModelRunner` computes (`model/` and `sampler`, the only place with torch). `node/` is
the process around it. May import `baton` and `baton_kernels`; knows nothing of peers, leases or wires.
"""
