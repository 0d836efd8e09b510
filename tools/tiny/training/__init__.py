"""The training of baton-tiny, in torch and transformers.

In order: `tokenizer`; the data (`codec`, `slabs`, `source`); `model`, `forward`, `train` with its `probe`; then
`evaluate` and `card`.

A batch is a flat run of tokens composed of slabs: a slab is [rows, length] samples of one length, so a row holds one
chat or text from position 0, and attention never crosses rows. Everything except attention is compiled once for the
fixed number of tokens (as in vLLM's flattened batch); attention runs on the slabs of each length. Worker processes
build the slabs, so the GPU does not wait for data.
"""
