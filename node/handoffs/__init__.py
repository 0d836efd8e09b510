"""KV on its way from this node to a decode node: streams of control messages, and the sending half of a handoff."""
