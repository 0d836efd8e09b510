"""The transport over UCX, on a thread of its own."""
