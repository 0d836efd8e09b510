"""One engine in this process, built as a node builds it, against the ceilings of the same run.

`decode`, `prefill` and `throughput` measure a section each, `all` runs all of them with one model; `sampling` and
`structured`: what sampling parameters and JSON schemas add to a step. `performance_page` writes the results into
docs/performance.md. `cpu` compares steps on a CPU with transformers and llama.cpp.

`bench` is the engine to be measured, `report` a run, `check` compares its answers with transformers', `shape` says what
a step must read and compute.
"""
