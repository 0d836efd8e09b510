"""The gRPC front end: `baton.v1.Generation`, health and reflection, over `router.service`.

It reads chats as `router.http` does, and has its limits.
"""
