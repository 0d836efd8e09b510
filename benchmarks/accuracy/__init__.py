"""How right answers are: logits beside those of transformers (`logits`, of `random_models`), what quantization costs in
quality (`quantization`), and which instances of JSON schemas the backends of structured outputs accept, and how fast
(`structured_schemas`, in a `schema_worker`)."""
