"""Operators over tensors and ints, each in a folder with a torch reference and a Triton implementation.

    paged_attention      attention of a flattened batch over KV blocks
    kv_write             writes new keys and values to their slots, optionally with rotary embedding and head norms
    fp8_kv               keys and values in 8 bits
    linear               matmuls with weights, optionally with the activation of a gated MLP
    quantized_linear     the same with quantized weights
    packed_linear        matmuls on a CPU, with weights in the fastest layout
    experts              the choice of experts, and the weighted sums of their gated MLPs
    rms_norm             RMS norm of rows, optionally after adding a residual
    all_reduce_rms_norm  the same after an all-reduce
    reduce_rms_norm      the same after a sum of parts that other ranks have sent
    gated_activation     activation of a gated MLP
    step_inputs          token ids, slots and block tables of a step
    block_checksum       checksums of KV blocks
    block_copy           copies of blocks within the pool, and to and from staging memory
    host_copy            copies of small arrays to and from pinned host memory
    token_mask           forbids tokens by bitmasks
    sampling             one token per row of logits

In addition, `streams` has the streams beside the engine's, and `kernel_graph` launches kernels on them, `event_thread`
waits for points in a GPU's work, `pdl` and `launcher` make launches cheaper, `unfinished` leaves the last step of a
result to its reader, and `cuda_driver` calls CUDA where torch does not.

An operator's `__init__` defines its signature, checks shapes and picks the implementation. This package imports no
other package of the project.
"""
