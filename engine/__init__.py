"""Turns sequences into tokens: model, KV cache, scheduler, sampler and the step that ties them together.

One thread owns an `Engine`. It takes sequences (`add`, or `adopt` for those prefilled elsewhere), and each step
computes one batch. Below it, `Scheduler` chooses what to compute, `BlockManager` tracks who owns which KV block and
`PrefixCache` what each block contains (all pure Python, without tensors), and a `ModelRunner` runs the model (`model/`,
the only place with torch). Beside the step loop, `LiveSequences` tracks the sequences and their blocks, `StepOutput`
appends their tokens, `Forks` and `BeamSearch` split one sequence into several, and `StepTiming` learns how long steps
take. A `KvTier`, if there is one, receives the blocks that are evicted from the pool. May import `baton` and
`baton_kernels`; knows nothing of leases, routers or KV transfers; the only network is that of ranks (`model/parallel`).
"""
