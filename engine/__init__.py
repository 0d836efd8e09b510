"""Turns sequences into tokens: model, KV cache, scheduler, sampler and the step that ties them together.

`Engine` is one thread's: it takes sequences (`add`, or `adopt` for those prefilled elsewhere), and each `step` computes
one batch. Below it `Scheduler` chooses what to compute, `BlockManager` says who has which KV block and `PrefixCache`
what is in it (all pure Python, no tensors), and a `ModelRunner` computes (`model/` and `sampler`, the one place with
torch). A `KvTier`, if there is one, is told what leaves the pool. `node/` is the process around it, which may import
`kv_transfer`; all else may import `baton` and `baton_kernels`, and knows nothing of peers, leases or wires.
"""
