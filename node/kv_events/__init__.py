"""Tells routers which blocks enter and leave the prefix cache, and publishes the same over ZMQ as vLLM does."""
