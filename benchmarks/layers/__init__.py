"""A part of a step alone: a layer of experts (`experts`, of `random_experts`; faster tilings for it, `experts_tune`),
experts that change places between ranks (`expert_moves`), and the sums of a layer that is divided among GPUs
(`rank_sums`)."""
