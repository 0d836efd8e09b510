"""A node with several ranks: each rank is a process that holds a part of the model and of the KV pool.

    rank 0       engine, scheduler, sampler -> a step's inputs --a ring in shared memory--> ranks 1, 2, ...
    every rank   its part of the forward, with all-reduces and all-gathers over the RankGroup: gloo (`group`), or NCCL
                 and memory that all GPUs map (`gpus`)

Pipeline parallel: the layers are divided among stages (`stages`), each with the same number of ranks. Hidden states go
from stage to stage, and logits from the last stage to rank 0 (`pipeline`), which meanwhile computes the first stage of
the next step.

Tensor parallel: each rank of a stage holds some of the attention heads, of the MLP's columns and of the vocabulary,
following the model's plan in transformers (`sharding`). Rank 0 makes all decisions; the others only compute. After
Megatron-LM (Shoeybi et al. 2019) and vLLM's executor.

Expert parallel: each rank holds some of a mixture's experts as a whole (`experts`). Experts may move between ranks
while the node serves (`eplb`: when, `expert_placement`: where to, `expert_slots`: how). Data parallel: several nodes,
each with an engine of its own, divide the experts among all their ranks and step together (`data_parallel`).
"""
