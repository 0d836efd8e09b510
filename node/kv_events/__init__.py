"""Which blocks enter and leave the prefix cache: told to routers, and published over ZMQ as vLLM does."""
