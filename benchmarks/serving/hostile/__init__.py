"""Hostile clients and peers beside a victim's stream: `python -m benchmarks.serving.hostile`."""
