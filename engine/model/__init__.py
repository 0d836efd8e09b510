"""Hugging Face models over our KV blocks: the one place where torch and transformers meet the engine.

`loader` finds and loads a checkpoint, `attention` puts paged attention under the unchanged model class and refuses
models that this would get wrong, `kv_pool` holds the blocks' memory, `runner` computes batches.
"""
