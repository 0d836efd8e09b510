"""What transports share that agree on each message over one TCP connection between two processes."""
