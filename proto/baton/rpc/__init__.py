"""gRPC between processes: channels, long-lived streams, peers that fall silent, and who may connect."""
