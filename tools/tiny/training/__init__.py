"""How baton-tiny is made, in torch and transformers.

In order: `tokenizer`; the data (`codec`, `slabs`, `source`); `model`, `forward`, `train` with its `probe`; then
`evaluate` and `card`.

A batch is a flat run of tokens made of slabs: a slab is [rows, length] samples of one length, so a row holds one
chat or text from position 0, and nothing attends across rows. Everything except attention is compiled once for the
fixed number of tokens (the idea of vLLM's flattened batch); attention runs over each slab. Worker processes make the
slabs, so the GPU does not wait for data.
"""
