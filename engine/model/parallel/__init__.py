"""A node of several ranks: each has a part of the model and of the KV pool, in a process of its own.

    rank 0   engine, scheduler, sampler -> a step's inputs --a ring in shared memory--> ranks 1, 2, ...
    every rank   its part of the forward, with sums and gathers over the RankGroup in between: gloo (`group`), or NCCL
                 and memory that all GPUs map (`gpus`)

Pipeline parallel: the layers are divided among stages (`stages`), each of so many ranks; hidden states go from stage to
stage, and logits from the last one to rank 0 (`pipeline`), which meanwhile computes the next step's first stage.

Tensor parallel: each rank of a stage has some of the attention heads, of the MLP's columns and of the vocabulary, as
transformers' plan of the model says (`sharding`). Everything that decides is on rank 0; the others only compute. After
Megatron-LM (Shoeybi et al. 2019) and vLLM's executor.

Expert parallel: each rank has some experts of a mixture as a whole (`experts`), which may change places while the node
serves (`eplb`: when, `expert_placement`: to where, `expert_slots`: how). Data parallel: several nodes, each with an
engine of its own, divide the experts among all their ranks, and step together (`data_parallel`).
"""
