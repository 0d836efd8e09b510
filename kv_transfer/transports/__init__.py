"""The transports: what carries bytes between the staging slots of two processes, behind `kv_transfer.transport`."""
