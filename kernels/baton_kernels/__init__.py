"""Operators over tensors and ints: each a folder with its torch reference, and room for a Triton twin beside it.

    paged_attention   attention of a flattened batch over KV blocks
    kv_write          new keys and values into their slots
    block_copy        whole blocks: within the pool, and to and from staging memory
    sampling          one token per row of logits

An operator's `__init__` holds its signature, checks shapes and picks the implementation. Nothing of ours is imported.
"""
