"""SGLang's own API: `/generate`, and what its clients ask a server before.

Benchmarks, evaluations and training that were made for SGLang use it. `schemas` has what clients send, `shape` what the
parts of answers look like, `events` how they are streamed."""
