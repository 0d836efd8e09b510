"""`--workers N`: a router in N processes that share both ports.

A supervisor (`supervisor`) holds the ports and keeps N workers (`worker`) running. Each is a router of its own towards
the nodes, with its own epoch, sessions and limits; the kernel gives each new connection to one of them. Workers talk to
each other only so that `/metrics` and `/load` speak for all (`siblings`).
"""
