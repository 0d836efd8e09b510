"""Operators over tensors and ints: each a folder with its torch reference and its Triton twin.

    paged_attention   attention of a flattened batch over KV blocks
    kv_write          new keys and values into their slots, with rotary embedding and head norms if wanted
    linear            products with weights, with the gate of a gated MLP if wanted
    rms_norm          normalised rows, after the residual is added
    gated_activation  the gate of a gated MLP
    step_inputs       token ids, slots and block tables of a step
    block_copy        whole blocks: within the pool, and to and from staging memory
    host_copy         small arrays to and from the host's pinned memory
    sampling          one token per row of logits

An operator's `__init__` holds its signature, checks shapes and picks the implementation. It imports no other package of
the project.
"""
