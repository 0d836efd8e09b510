"""A prefill node, a decode node and a router in this process: the real ones, without their sockets.

The roles' state machines run on threads of their own (`node.loop`), the router's on the background loop. What travels
over gRPC between processes passes here as the messages themselves (`router_link`, `handoff_link`), and KV blocks
travel over the transport `memory`. All but `settings` needs the extra [node].
"""
