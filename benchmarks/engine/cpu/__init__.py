"""Steps on a CPU, beside transformers and llama.cpp: `python -m benchmarks.engine.cpu`."""
