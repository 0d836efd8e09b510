"""The transports: implementations of `kv_transfer.transport`, which move bytes between two processes' slots."""
