"""Turns sequences into tokens: model, KV cache, scheduler, sampler and the step that ties them together.

One thread owns an `Engine`. It takes sequences (`add`, or `adopt` for those prefilled elsewhere), and each step
computes one batch. Below it, `Scheduler` chooses what to compute, `BlockManager` tracks which KV block belongs to whom
and `PrefixCache` what is in it (all pure Python, without tensors), and a `ModelRunner` runs the model (`model/`, the
only place with torch). Beside the step loop, `LiveSequences` knows the sequences and what they hold, `StepOutput`
enters their tokens, `Forks` and `BeamSearch` make several of one, and `StepTiming` learns how long steps take. A
`KvTier`, if there is one, receives the blocks that are evicted from the pool. May import `baton` and `baton_kernels`;
knows nothing of leases, routers or KV transfers; the only network is that of ranks (`model/parallel`).
"""
