"""Turns sequences into tokens: model, KV cache, scheduler, sampler and the step that ties them together.

`Engine` is one thread's: it takes sequences (`add`, or `adopt` for those prefilled elsewhere), and each `step` computes
one batch. Below it `Scheduler` chooses what to compute, `BlockManager` says where KV lives (both pure Python, no
tensors), and a `ModelRunner` computes (`model/` and `sampler`, the one place with torch). `node/` is the process around
it. May import `baton` and `baton_kernels`; knows nothing of peers, leases or wires.
"""
